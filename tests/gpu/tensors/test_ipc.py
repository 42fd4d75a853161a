"""The fallback: leases as parts of a slab that legacy CUDA IPC handles share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from common.ids import Epoch, LeaseId, WeightsVersion
from common.tensors.cuda_events import finished
from common.tensors.views import tensor_view
from tests.gpu.tensors.conftest import MIB, SLACK_BYTES, free_bytes, remote
from tests.gpu.tensors.participant import RUN
from tests.gpu.tensors.test_leases import allocate
from tests.integration.broker.conftest import (
    ENCODER,
    LEARNER,
    Broker,
    Started,
    start_broker,
    stop,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

ELEMENTS = 8 * MIB


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """A broker with a slab of 1 GiB."""
    folder = tmp_path_factory.mktemp("broker")
    started = start_broker(folder, device="cuda", hbm_budget_gib=1, arena="ipc")
    yield started
    assert stop(started.process) == 0, started.log


async def test_two_processes_share_the_same_bytes(broker: Broker) -> None:
    learner = broker.clients[0]
    async with remote(broker, ENCODER) as producer:
        for value in (2.5, -3.0):
            made = await producer.order("allocate", consumers=["learner/0"], elements=ELEMENTS)
            assert made["device"] == learner.device
            await producer.order("fill", value=value, busy_ms=100)
            await producer.order("seal")
            (held,) = await learner.acquire([LeaseId(made["lease"])], epoch=Epoch(1))
            view = tensor_view(held, "values")
            assert bool((view == value).all())
            await producer.order("fill", value=9)
            assert (await producer.order("read"))["last"] == 9
            assert bool((view == 9).all())
            del view
            held.release()
            await broker.settle(0)


async def test_parts_do_not_overlap_and_are_used_again(broker: Broker) -> None:
    async with remote(broker, ENCODER) as producer:
        before = free_bytes()
        for number in range(20):
            await producer.order("allocate", consumers=["learner/0"], elements=ELEMENTS)
            await producer.order("fill", value=number)
            await producer.order("seal")
            second = await producer.order("allocate", consumers=["learner/0"], elements=ELEMENTS)
            await producer.order("fill", value=-number)
            first = await producer.order("read")
            assert first == {"first": -number, "last": -number}
            await producer.order("seal")
            learner = broker.clients[0]
            one, two = await learner.acquire(
                [LeaseId(second["lease"] - 1), LeaseId(second["lease"])], epoch=Epoch(1)
            )
            assert bool((tensor_view(one, "values") == number).all())
            assert bool((tensor_view(two, "values") == -number).all())
            learner.release([one, two])
            await broker.settle(0)
        torch.cuda.empty_cache()
        assert free_bytes() > before - SLACK_BYTES


async def test_storages_are_zero_and_leases_when_asked(broker: Broker) -> None:
    learner, encoder = broker.clients[0], await broker.join(ENCODER)
    dirty = await allocate(encoder, LEARNER, size_bytes=512 * MIB)
    async with remote(broker, ENCODER) as writer:
        del dirty  # the new one has replaced the older connection, and so ended its leases
        made = await writer.order("allocate", consumers=["learner/0"], elements=ELEMENTS)
        await writer.order("fill", value=1)
        await writer.order("seal")
        (held,) = await learner.acquire([LeaseId(made["lease"])], epoch=Epoch(1))
        held.release()
        await broker.settle(0)
        made = await writer.order("create_storage", readers=["learner/0"], elements=ELEMENTS // 2)
        assert (made["created"], made["largest"]) == (True, 0.0)
        storage = await learner.open_storage(RUN, "weights")
        await writer.order("write", version=0, value=4)
        with await storage.hold_read(WeightsVersion(0)):
            assert bool((tensor_view(storage, "values") == 4).all())
            await finished()
        storage.close()
