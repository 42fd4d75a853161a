"""The driver's calls, on a GPU."""

from __future__ import annotations

import pytest
import torch

from common.gpu.driver import (
    CudaDriverError,
    CudaMissing,
    call,
    device_uuid,
    memory_info,
    ordinal_of,
    out_of_memory,
)
from common.gpu.shared_memory import OwnedMemory, granularity_bytes

pytestmark = pytest.mark.gpu


def test_uuids_are_torchs() -> None:
    for ordinal in range(torch.cuda.device_count()):
        assert device_uuid(ordinal) == f"GPU-{torch.cuda.get_device_properties(ordinal).uuid}"
        assert ordinal_of(device_uuid(ordinal)) == ordinal


def test_a_gpu_that_is_not_here() -> None:
    with pytest.raises(CudaMissing, match="GPU-none is not among"):
        ordinal_of("GPU-none")


def test_failures_name_the_call_and_the_status() -> None:
    with pytest.raises(CudaDriverError, match="cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE"):
        call("cuDeviceGet", 1000)


def test_a_full_device_is_told_from_other_failures() -> None:
    _, total_bytes = memory_info(0)
    page_bytes = granularity_bytes(0)
    with pytest.raises(CudaDriverError) as caught:
        OwnedMemory(0, (total_bytes // page_bytes + 1) * page_bytes)
    assert out_of_memory(caught.value)
    with pytest.raises(CudaDriverError) as caught:
        OwnedMemory(0, page_bytes + 1)
    assert not out_of_memory(caught.value)


def test_memory_info_is_torchs() -> None:
    assert memory_info(0)[1] == torch.cuda.mem_get_info(0)[1]
