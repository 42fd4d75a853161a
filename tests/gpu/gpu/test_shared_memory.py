"""Memory with an owner and mappers, here both in one process."""

from __future__ import annotations

import os

import pytest
import torch

from common.gpu.driver import memory_info
from common.gpu.shared_memory import (
    MappedMemory,
    OwnedMemory,
    granularity_bytes,
    why_not_shareable,
)
from common.tensors.device import DeviceBytes, DevicePages

pytestmark = pytest.mark.gpu

SIZE_BYTES = 512 << 20
SLACK_BYTES = 32 << 20


def mapped(owned: OwnedMemory) -> MappedMemory:
    descriptor = owned.export()
    try:
        return MappedMemory(0, descriptor, owned.size_bytes)
    finally:
        os.close(descriptor)


def tensor(pages: DevicePages) -> torch.Tensor:
    return torch.as_tensor(DeviceBytes(pages, 0, pages.size_bytes), device="cuda:0")


def test_this_device_can_share() -> None:
    assert why_not_shareable(0) == ""
    assert SIZE_BYTES % granularity_bytes(0) == 0


def test_two_mappings_are_the_same_bytes_and_outlive_the_owner() -> None:
    before = memory_info(0)[0]
    owned = OwnedMemory(0, SIZE_BYTES)
    owned.zero()
    one, two = mapped(owned), mapped(owned)
    first, second = tensor(DevicePages("GPU", one)), tensor(DevicePages("GPU", two))
    assert first.data_ptr() == one.address != second.data_ptr()
    assert not first.any()
    first.fill_(7)
    torch.cuda.synchronize()
    owned.release()
    owned.release()
    assert bool((second == 7).all())
    torch.cuda.synchronize()
    one.unmap()
    one.unmap()
    assert memory_info(0)[0] < before - SIZE_BYTES + SLACK_BYTES
    two.unmap()
    torch.cuda.empty_cache()
    assert memory_info(0)[0] > before - SLACK_BYTES


def test_a_bad_descriptor_leaves_nothing_behind(tmp_path) -> None:
    from common.gpu.driver import CudaDriverError

    (tmp_path / "file").write_bytes(b"x")
    with (tmp_path / "file").open() as file, pytest.raises(CudaDriverError, match="Import"):
        MappedMemory(0, file.fileno(), SIZE_BYTES)
