"""Processes killed in the middle of GPU work: leases end, memory comes back, others go on."""

from __future__ import annotations

import asyncio

import pytest
import torch

from common.ids import Epoch, LeaseId, WeightsVersion
from common.tensors.errors import StaleLease, StorageTorn
from common.tensors.views import tensor_view
from tests.gpu.tensors.conftest import MIB, SLACK_BYTES, free_bytes, remote, until
from tests.gpu.tensors.participant import RUN
from tests.integration.broker.conftest import ENCODER, ROLLOUT, Broker

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

ELEMENTS = 256 * MIB
"""bfloat16: 512 MiB."""
SIZE_BYTES = 2 * ELEMENTS
IN_FLIGHT_MS = 3000


async def test_killed_producer_with_kernels_in_flight(broker: Broker) -> None:
    learner, before = broker.clients[0], free_bytes()
    async with remote(broker, ENCODER) as producer:
        made = await producer.order("allocate", consumers=["learner/0"], elements=ELEMENTS)
        acquire = asyncio.create_task(learner.acquire([LeaseId(made["lease"])], epoch=Epoch(1)))
        await producer.order("fill", value=1, busy_ms=IN_FLIGHT_MS)
        assert (await broker.ledger()).used_bytes == SIZE_BYTES
        await producer.kill()
        with pytest.raises(StaleLease, match=r"producer prefix-encoder/0 died before sealing"):
            async with asyncio.timeout(10):
                await acquire
    await broker.settle(0)
    await until(lambda: free_bytes() > before - SLACK_BYTES, "the dead producer's memory is free")


async def test_killed_producer_after_the_seal_changes_nothing(broker: Broker) -> None:
    learner = broker.clients[0]
    async with remote(broker, ENCODER) as producer:
        made = await producer.order("allocate", consumers=["learner/0"], elements=ELEMENTS)
        await producer.order("fill", value=7)
        await producer.order("seal")
        await producer.kill()
    (held,) = await learner.acquire([LeaseId(made["lease"])], epoch=Epoch(1))
    assert bool((tensor_view(held, "values") == 7).all())
    held.release()
    await broker.settle(0)


async def test_killed_consumer_with_kernels_in_flight(broker: Broker) -> None:
    learner, before = broker.clients[0], free_bytes()
    async with remote(broker, ENCODER) as producer:
        made = await producer.order(
            "allocate", consumers=["learner/0", "rollout/0"], elements=ELEMENTS
        )
        await producer.order("fill", value=5)
        await producer.order("seal")
        (held,) = await learner.acquire([LeaseId(made["lease"])], epoch=Epoch(1))
        async with remote(broker, ROLLOUT) as consumer:
            await consumer.order("acquire", lease=made["lease"])
            # A consumer must not write; this one does, so that its kernels use the memory.
            await consumer.order("fill", value=5, busy_ms=IN_FLIGHT_MS)
            await consumer.kill()
        view = tensor_view(held, "values")
        assert bool((view == 5).all())
        assert (await broker.ledger()).used_bytes == SIZE_BYTES, "the learner still holds it"
        del view
        held.release()
        await broker.settle(0)
    await until(lambda: free_bytes() > before - SLACK_BYTES, "the lease's memory is free")


async def test_killed_writer_leaves_the_storage_torn(broker: Broker) -> None:
    learner = broker.clients[0]
    async with remote(broker, ENCODER) as writer:
        await writer.order("create_storage", readers=["learner/0"], elements=MIB)
        await writer.order("write", version=0, value=1)
        storage = await learner.open_storage(RUN, "weights")
        await writer.order("write", version=1, value=2, publish=False)
        waiting = asyncio.create_task(storage.hold_read(WeightsVersion(1)))
        await writer.kill()
        with pytest.raises(StorageTorn, match=r"prefix-encoder/0 died while it wrote version 1"):
            async with asyncio.timeout(10):
                await waiting
    async with remote(broker, ENCODER) as writer:
        made = await writer.order("create_storage", readers=["learner/0"], elements=MIB)
        assert not made["created"]
        await writer.order("write", version=0, value=1)
        with await storage.hold_read(WeightsVersion(0)):
            assert bool((tensor_view(storage, "values") == 1).all())


async def test_a_killed_broker_takes_no_bytes_that_are_mapped(mortal_broker: Broker) -> None:
    learner = mortal_broker.clients[0]
    async with remote(mortal_broker, ENCODER) as producer:
        made = await producer.order("allocate", consumers=["learner/0"], elements=ELEMENTS)
        await producer.order("fill", value=3)
        await producer.order("seal")
        (held,) = await learner.acquire([LeaseId(made["lease"])], epoch=Epoch(1))
        view = tensor_view(held, "values")
    mortal_broker.process.kill()
    async with asyncio.timeout(10):
        await learner.closed.wait()
    await asyncio.to_thread(mortal_broker.process.wait, 10)
    assert bool((view == 3).all())
    before = free_bytes()
    held.release()
    del view
    torch.cuda.synchronize()
    await until(lambda: free_bytes() > before + SIZE_BYTES - SLACK_BYTES, "the last mapping ended")
