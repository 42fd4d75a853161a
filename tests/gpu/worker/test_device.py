"""A worker's device."""

from __future__ import annotations

import pytest
import torch

from common.config.deployment import Deployment
from common.gpu.driver import CudaMissing, device_uuid
from common.ids import Participant, Service
from common.worker.device import WorkerDevice
from common.worker.device_memory import device_memory

pytestmark = pytest.mark.gpu


def test_a_rank_has_the_gpu_of_its_number() -> None:
    deployment = Deployment(device="cuda")
    device = WorkerDevice.of(deployment, Participant(service=Service.LEARNER))
    assert (device.torch, device.uuid) == (torch.device("cuda", 0), device_uuid(0))
    device.enter()
    torch.cuda._sleep(200_000_000)
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    device.wait()
    assert event.query()


def test_the_allocator_keeps_to_its_limit() -> None:
    device = WorkerDevice(torch=torch.device("cuda", 0), uuid=device_uuid(0), budgeted=True)
    size = 1 << 30
    torch.cuda.empty_cache()
    has = torch.cuda.memory_reserved()
    device.limit(has + 2 * size)
    try:
        memory = device_memory(device.torch)
        assert memory is not None
        assert abs(memory.free - 2 * size) < size // 4
        first = torch.empty(size, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * size, dtype=torch.uint8, device="cuda")
        device.limit(has + 4 * size)
        second = torch.empty(2 * size, dtype=torch.uint8, device="cuda")
        del first, second
    finally:
        device.limit(torch.cuda.get_device_properties(0).total_memory)


def test_a_rank_without_a_gpu() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(CudaMissing, match=f"learner/{count} needs GPU {count}, .* sees {count}"):
        WorkerDevice.of(Deployment(device="cuda"), Participant(service=Service.LEARNER, rank=count))
