"""Nothing grows over many leases: device memory, host memory, descriptors."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import psutil
import pytest

from common.ids import Epoch
from common.tensors.cuda_events import finished, recorded
from common.tensors.views import tensor_view
from tests.gpu.tensors.conftest import MIB, free_bytes
from tests.gpu.tensors.test_leases import PAGE, allocate
from tests.integration.broker.conftest import ENCODER, LEARNER, Broker

if TYPE_CHECKING:
    from common.tensors.client import BrokerClient

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

CYCLES = 1000
WARM_UP = 200


async def cycle(encoder: BrokerClient, learner: BrokerClient, number: int) -> None:
    """One lease from allocation to free, with and without an event, of changing size."""
    lease = await allocate(encoder, LEARNER, size_bytes=PAGE * (1 + number % 7))
    tensor_view(lease, "values").fill_(number % 100)
    await finished()
    lease.seal(after=recorded())
    (held,) = await learner.acquire([lease.id], epoch=Epoch(1))
    assert tensor_view(held, "values")[-1].item() == number % 100
    held.release(after=recorded() if number % 2 else None)


async def test_a_thousand_leases_leave_nothing_behind(broker: Broker) -> None:
    learner, encoder = broker.clients[0], await broker.join(ENCODER)
    for number in range(WARM_UP):
        await cycle(encoder, learner, number)
    await broker.settle(0)
    here, there = psutil.Process(), psutil.Process(broker.process.pid)

    def look() -> dict[str, int]:
        return {
            "device": -free_bytes(),
            "broker": there.memory_info().rss,
            "client": here.memory_info().rss,
            "broker descriptors": broker.fds,
            "client descriptors": len(os.listdir("/proc/self/fd")),
        }

    before = look()
    for number in range(CYCLES):
        await cycle(encoder, learner, number)
    await broker.settle(0)
    grown = {key: value - before[key] for key, value in look().items()}
    assert grown["device"] <= 8 * MIB, grown
    assert grown["broker"] <= 16 * MIB, grown
    assert grown["client"] <= 32 * MIB, grown
    assert grown["broker descriptors"] <= 0, grown
    assert grown["client descriptors"] <= 0, grown
