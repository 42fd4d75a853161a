"""The broker with participants in real processes: shared bytes, and deaths."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from common.events import event_from_proto
from common.events.bodies import ParticipantDied
from common.ids import Epoch, Incarnation, WeightsVersion
from common.tensors.client import BrokerClient
from common.tensors.errors import BrokerGone, StaleLease, StorageTorn
from protos.rollplex.v1 import broker_pb2 as pb
from tests.integration.broker.conftest import (
    ENCODER,
    LEARNER,
    REPOSITORY,
    ROLLOUT,
    Broker,
    start_broker,
    stop,
)
from tests.integration.broker.participant import RUN, SIZE_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from common.ids import Participant


class Remote:
    """A participant process that does what it is told."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def order(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{json.dumps({'do': do, **arguments})}\n".encode())
        async with asyncio.timeout(20):
            line = await self.process.stdout.readline()
        assert line, f"{do} ended the participant"
        return json.loads(line)


@asynccontextmanager
async def remote(broker: Broker, participant: Participant) -> AsyncIterator[Remote]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.broker.participant",
        str(broker.deployment.broker_socket),
        str(participant),
        cwd=REPOSITORY,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Remote(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_two_processes_share_the_same_pages(broker: Broker) -> None:
    async with remote(broker, ENCODER) as producer, remote(broker, ROLLOUT) as consumer:
        lease = (await producer.order("allocate", consumer="rollout/0", text="first"))["lease"]
        await producer.order("seal")
        await consumer.order("acquire", lease=lease)
        assert (await consumer.order("read", length=5))["text"] == "first"
        written = await producer.order("overwrite", text="later")
        read = await consumer.order("read", length=5)
        assert read["text"] == "later"
        assert read["inodes"] == written["inodes"]
        assert len(read["inodes"]) == 1


async def test_killed_producer_is_noticed(broker: Broker) -> None:
    learner = broker.clients[0]
    async with remote(broker, ENCODER) as producer:
        lease = (await producer.order("allocate", consumer="learner/0", text="half"))["lease"]
        acquire = asyncio.create_task(learner.acquire([lease], epoch=Epoch(1)))
        await broker.settle(SIZE_BYTES)
        pid = producer.process.pid
        producer.process.kill()
        with pytest.raises(StaleLease, match=r"producer prefix-encoder/0 died before sealing"):
            async with asyncio.timeout(10):
                await acquire
    await broker.settle(0)
    body = await next_death(broker)
    assert (body.participant, body.pid) == (ENCODER, pid)


async def test_killed_consumer_lets_go(broker: Broker) -> None:
    async with remote(broker, ENCODER) as producer, remote(broker, ROLLOUT) as consumer:
        lease = (await producer.order("allocate", consumer="rollout/0", text="kept"))["lease"]
        await producer.order("seal")
        await consumer.order("acquire", lease=lease)
        assert (await broker.ledger()).used_bytes == SIZE_BYTES
        consumer.process.kill()
        await broker.settle(0)


async def test_killed_writer_leaves_the_storage_torn(broker: Broker) -> None:
    learner = broker.clients[0]
    async with remote(broker, ENCODER) as writer:
        assert (await writer.order("write_weights", version=0, publish=True))["created"]
        storage = await learner.open_storage(RUN, "weights")
        with await storage.hold_read(WeightsVersion(0)):
            assert storage.buffer("bytes")[0] == 1
        await writer.order("write_weights", version=1, publish=False)
        waiting = asyncio.create_task(storage.hold_read(WeightsVersion(1)))
        writer.process.kill()
        with pytest.raises(StorageTorn, match=r"prefix-encoder/0 died while it wrote version 1"):
            async with asyncio.timeout(10):
                await waiting
    async with remote(broker, ENCODER) as writer:
        assert not (await writer.order("write_weights", version=0, publish=True))["created"]
        with await storage.hold_read(WeightsVersion(0)):
            assert storage.buffer("bytes")[0] == 1


async def test_killed_broker_is_noticed_and_replaced(mortal_broker: Broker) -> None:
    learner, process = mortal_broker.clients[0], mortal_broker.process
    waiting = asyncio.create_task(learner.open_storage(RUN, "never", timeout_s=100))
    await asyncio.sleep(0)
    process.kill()
    async with asyncio.timeout(10):
        await learner.closed.wait()
        with pytest.raises(BrokerGone, match="the broker closed the connection, or died"):
            await waiting
    with pytest.raises(BrokerGone, match="or died"):
        await learner.reserve(RUN, "activations", 1)
    await asyncio.to_thread(process.wait, 10)
    successor = start_broker(mortal_broker.started.folder)
    try:
        client = await BrokerClient.connect(
            successor.deployment.broker_socket, LEARNER, Incarnation("again"), timeout_s=20
        )
        assert client.broker_incarnation != learner.broker_incarnation
        await client.close()
    finally:
        assert stop(successor.process) == 0


async def test_second_broker_is_refused_and_does_no_harm(broker: Broker) -> None:
    second = start_broker(broker.started.folder)
    assert await asyncio.to_thread(second.process.wait, 20) == 1
    assert f"another broker serves {broker.deployment.broker_socket}" in second.log
    await broker.clients[0].reserve(RUN, "activations", 1)


async def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(BrokerGone, match=r"no broker at .*nobody within 0\.1 s"):
        await BrokerClient.connect(tmp_path / "nobody", LEARNER, Incarnation("x"), timeout_s=0.1)


async def next_death(broker: Broker) -> ParticipantDied:
    async with asyncio.timeout(10):
        async for watched in broker.stub.WatchEvents(pb.WatchEventsRequest()):
            event = event_from_proto(watched.event)
            if isinstance(event.body, ParticipantDied):
                assert (event.run_id, event.epoch) == (RUN, 1)
                return event.body
    raise AssertionError("the stream ended")
