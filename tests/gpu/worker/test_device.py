"""A worker's device."""

from __future__ import annotations

import pytest
import torch

from common.config.deployment import Deployment
from common.gpu.driver import CudaMissing, device_uuid
from common.ids import Participant, Service
from common.worker.device import WorkerDevice

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


def test_a_rank_without_a_gpu() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(CudaMissing, match=f"learner/{count} needs GPU {count}, .* sees {count}"):
        WorkerDevice.of(Deployment(device="cuda"), Participant(service=Service.LEARNER, rank=count))
