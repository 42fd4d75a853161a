"""Storages that leave the arena and come back, with a real broker and real participants."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import grpc
import pytest

from common.events import event_from_proto
from common.events.bodies import ContentsMoved, MemoryWanted
from common.ids import Epoch, Participant, Service, WeightsVersion
from common.tensors.errors import BrokerTimeout
from common.tensors.spec import DType, TensorSpec
from common.tensors.views import tensor_view
from protos.rollplex.v1 import broker_pb2 as pb
from protos.rollplex.v1.broker_pb2_grpc import BrokerStub
from tests.integration.broker.conftest import (
    ARENA_BYTES,
    ENCODER,
    LEARNER,
    ROLLOUT,
    SETTLE_S,
    Broker,
    connected,
    free_port,
    start_broker,
    stop,
)
from tests.integration.broker.participant import (
    OPTIMIZER,
    OPTIMIZER_BYTES,
    RUN,
    contents,
    inodes,
)
from tests.integration.broker.test_processes import remote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.tensors.client import BrokerClient
    from common.tensors.lease import Lease
    from common.tensors.storage import Storage

REFERENCE = Participant(service=Service.REFERENCE)
MEMFD = "rollplex:optimizer"
SEED = 3


async def written(client: BrokerClient) -> Storage:
    """A storage with version 0 in it."""
    storage = await client.open_storage(RUN, "optimizer", create=OPTIMIZER)
    hold = await storage.hold_write(WeightsVersion(0))
    storage.buffer("bytes")[:] = contents(SEED)
    await hold.publish()
    return storage


async def is_in_state(broker: Broker, begins: str) -> pb.Ledger:
    async with asyncio.timeout(SETTLE_S):
        while True:
            ledger = await broker.ledger()
            states = [entry.state for entry in ledger.entries if entry.name == "optimizer"]
            if states and all(state.startswith(begins) for state in states):
                return ledger
            await asyncio.sleep(0.005)


async def spilled(broker: Broker, storage: Storage) -> None:
    assert storage.park()
    await is_in_state(broker, "spilled")


def used(ledger: pb.Ledger) -> dict[str, int]:
    return {arena.device: arena.used_bytes for arena in ledger.arenas}


def shared_pages(pid: int) -> list[str]:
    """Descriptors and mappings of the storage's memory that a process has."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    descriptors = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            descriptors.append(os.readlink(entry))
    return [text for text in (*maps, *descriptors) if MEMFD in text]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_contents_and_address_survive_and_the_memory_is_given_back(broker: Broker) -> None:
    storage = await written(broker.clients[0])
    values = tensor_view(storage, "bytes")
    address = values.data_ptr()
    assert shared_pages(os.getpid())
    for version in range(1, 4):
        await spilled(broker, storage)
        assert storage.park()
        ledger = await broker.ledger()
        assert used(ledger)["cpu"] == 0
        assert used(ledger)["copies"] >= OPTIMIZER_BYTES
        assert shared_pages(os.getpid()) == shared_pages(broker.process.pid) == []
        hold = await storage.hold_write(WeightsVersion(version))
        assert used(await broker.ledger())["cpu"] >= OPTIMIZER_BYTES
        assert values.data_ptr() == address == tensor_view(storage, "bytes").data_ptr()
        assert bytes(storage.buffer("bytes")[version:]) == contents(SEED)[version:]
        values[version - 1] = 255
        await hold.publish()
    assert bytes(storage.buffer("bytes")[:3]) == b"\xff\xff\xff"
    storage.close()
    assert not storage.park()


async def test_a_storage_that_is_held_is_not_parked(broker: Broker) -> None:
    storage = await written(broker.clients[0])
    hold = await storage.hold_read(WeightsVersion(0))
    waiting = asyncio.create_task(storage.hold_write(WeightsVersion(1)))
    await asyncio.sleep(0)
    assert not storage.park()
    hold.release()
    assert not storage.park()
    await (await waiting).publish()
    await spilled(broker, storage)
    storage.close()


async def test_holds_at_once_find_it_mapped(broker: Broker) -> None:
    storage = await written(broker.clients[0])
    await spilled(broker, storage)
    again = broker.clients[0].open_storage(RUN, "optimizer")
    reads = [storage.hold_read(WeightsVersion(0)) for _ in range(5)]
    *holds, other = await asyncio.gather(*reads, again)
    assert bytes(storage.buffer("bytes")) == bytes(other.buffer("bytes")) == contents(SEED)
    assert len(inodes(MEMFD)) == 1
    for hold in holds:
        hold.release()
    await spilled(broker, other)
    assert inodes(MEMFD) == []


async def test_prefetch_comes_before_the_hold(broker: Broker) -> None:
    storage = await written(broker.clients[0])
    await spilled(broker, storage)
    storage.prefetch()
    await is_in_state(broker, "readable(v0)")
    assert inodes(MEMFD) == []
    with await storage.hold_read(WeightsVersion(0), timeout_s=0):
        assert bytes(storage.buffer("bytes")) == contents(SEED)


async def test_what_was_prefetched_too_early_gives_way_to_a_lease(broker: Broker) -> None:
    learner = broker.clients[0]
    storage = await written(learner)
    await spilled(broker, storage)
    storage.prefetch()
    await is_in_state(broker, "readable(v0)")
    lease = await full_lease(learner)
    holding = asyncio.create_task(storage.hold_read(WeightsVersion(0)))
    lease.abandon("a test")
    with await holding:
        assert bytes(storage.buffer("bytes")) == contents(SEED)


async def test_a_reader_keeps_it_until_it_parks_too_and_cannot_write(broker: Broker) -> None:
    storage = await written(broker.clients[0])
    encoder = await broker.join(ENCODER)
    theirs = await encoder.open_storage(RUN, "optimizer")
    assert theirs.buffer("bytes").readonly
    assert storage.park()
    with await theirs.hold_read(WeightsVersion(0)):
        assert bytes(theirs.buffer("bytes")) == contents(SEED)
    await is_in_state(broker, "readable(v0)")
    await spilled(broker, theirs)
    with await theirs.hold_read(WeightsVersion(0)):
        assert bytes(theirs.buffer("bytes")) == contents(SEED)


@pytest.mark.parametrize("granted", [False, True])
async def test_a_cancelled_hold_does_not_keep_it(broker: Broker, granted: bool) -> None:
    storage = await written(broker.clients[0])
    await spilled(broker, storage)
    holding = asyncio.create_task(storage.hold_read(WeightsVersion(0 if granted else 1)))
    await asyncio.sleep(0)
    if granted:
        wait_for_grant(broker)
    holding.cancel()
    with suppress(asyncio.CancelledError):
        await holding
    await is_in_state(broker, "spilled")
    with await storage.hold_read(WeightsVersion(0)):
        assert bytes(storage.buffer("bytes")) == contents(SEED)


def wait_for_grant(broker: Broker) -> None:
    """Blocks the event loop, which so cannot read the answer."""
    address = broker.deployment.grpc_address(Participant(service=Service.BROKER))
    give_up_s = time.monotonic() + SETTLE_S
    with grpc.insecure_channel(address) as channel:
        stub = BrokerStub(channel)
        while True:
            entries = stub.GetLedger(pb.GetLedgerRequest()).entries
            if any(entry.name == "optimizer" and entry.holders for entry in entries):
                return
            assert time.monotonic() < give_up_s


async def full_lease(client: BrokerClient, *, epoch: int = 1) -> Lease:
    """Take all of the arena that is left."""
    size = ARENA_BYTES - (1 << 20)
    tensor = TensorSpec(name="bytes", dtype=DType.UINT8, shape=(size,))
    return await client.allocate(
        run_id=RUN,
        epoch=Epoch(epoch),
        group=None,
        name="kv",
        tensors=[tensor],
        consumers=[ROLLOUT],
    )


async def test_the_node_is_told_when_there_is_no_room(broker: Broker) -> None:
    learner = broker.clients[0]
    storage = await written(learner)
    await spilled(broker, storage)
    lease = await full_lease(learner)
    with pytest.raises(BrokerTimeout, match="the storage is spilled readable") as caught:
        await storage.hold_read(WeightsVersion(0), timeout_s=0.05)
    assert "learner/0" in str(caught.value)
    assert "kv" in str(caught.value)
    holding = asyncio.create_task(storage.hold_read(WeightsVersion(0)))
    async with asyncio.timeout(SETTLE_S):
        async for watched in broker.stub.WatchEvents(pb.WatchEventsRequest()):
            body = event_from_proto(watched.event).body
            if isinstance(body, MemoryWanted):
                break
    assert body == MemoryWanted(device="cpu", size_bytes=OPTIMIZER_BYTES)
    lease.abandon("a test")
    with await holding:
        assert bytes(storage.buffer("bytes")) == contents(SEED)


@pytest.mark.parametrize("state", ["spilling", "spilled", "restoring", "held"])
async def test_contents_survive_a_killed_participant(broker: Broker, state: str) -> None:
    pid = broker.process.pid
    async with remote(broker, REFERENCE) as first:
        assert (await first.order("create_optimizer", seed=SEED))["created"]
        if state == "spilling":
            # The broker hears of the parking and of the death at the same time.
            with stopped(pid):
                assert (await first.order("park"))["parked"]
                first.process.kill()
                await first.process.wait()
        else:
            assert (await first.order("park"))["parked"]
            await is_in_state(broker, "spilled")
        if state == "restoring":
            with stopped(pid):
                holding = asyncio.create_task(first.order("check_optimizer", seed=SEED))
                await asyncio.sleep(0.05)
                first.process.kill()
                await first.process.wait()
            with pytest.raises(AssertionError, match="ended the participant"):
                await holding
        if state == "held":
            assert (await first.order("check_optimizer", seed=SEED))["equal"]
        if state != "restoring" and first.process.returncode is None:
            first.process.kill()
            await first.process.wait()
    async with remote(broker, REFERENCE) as second:
        opened = await second.order("create_optimizer", seed=SEED + 1)
        assert opened == {"created": False, "version": 0, "torn": False}
        assert (await second.order("check_optimizer", seed=SEED))["equal"]


async def test_a_run_that_is_closed_while_it_is_spilled_leaves_nothing(broker: Broker) -> None:
    storage = await written(broker.clients[0])
    await spilled(broker, storage)
    before = broker.fds
    freed = (await broker.stub.CloseRun(pb.CloseRunRequest(run_id="run"))).freed_bytes
    assert freed >= OPTIMIZER_BYTES
    assert sum(used(await broker.settle(0)).values()) == 0
    assert broker.fds == before
    storage.close()


async def test_what_is_copied_is_counted(tmp_path: Path) -> None:
    ports = {"grpc_port": free_port(), "http_port": free_port()}
    started = start_broker(tmp_path, services={"broker": ports})
    try:
        async with connected(started) as broker:
            storage = await written(broker.clients[0])
            await spilled(broker, storage)
            (await storage.hold_read(WeightsVersion(0))).release()
            url = f"http://127.0.0.1:{ports['http_port']}/metrics"
            page = await asyncio.to_thread(lambda: urlopen(url, timeout=10).read().decode())
            counted = dict(re.findall(r"^rollplex_(\w+)_total ([\d.e+-]+)$", page, re.MULTILINE))
            assert float(counted["spilled_bytes"]) == OPTIMIZER_BYTES
            assert float(counted["restored_bytes"]) == OPTIMIZER_BYTES
            assert float(counted["spilled_seconds"]) > 0
            assert float(counted["restored_seconds"]) > 0
    finally:
        assert stop(started.process) == 0


async def test_moves_are_events_of_the_runs_epoch(broker: Broker) -> None:
    storage = await written(broker.clients[0])
    await spilled(broker, storage)
    with await storage.hold_read(WeightsVersion(0)):
        assert bytes(storage.buffer("bytes")) == contents(SEED)
    await spilled(broker, storage)
    seen = []
    async with asyncio.timeout(SETTLE_S):
        async for watched in broker.stub.WatchEvents(pb.WatchEventsRequest()):
            event = event_from_proto(watched.event)
            if isinstance(event.body, ContentsMoved):
                assert (event.run_id, event.epoch) == (RUN, 1)
                seen.append(event.body)
            if len(seen) == 3:
                break
    assert [body.restored for body in seen] == [False, True, False]
    for body in seen:
        assert (body.storage, body.device) == ("optimizer", "cpu")
        assert body.size_bytes == OPTIMIZER_BYTES
        assert body.seconds > 0
    # Nobody wrote in between: the copy of the first time is still good.
    with await storage.hold_read(WeightsVersion(0)):
        assert bytes(storage.buffer("bytes")) == contents(SEED)
    storage.close()


async def test_a_broker_that_ends_while_it_copies_ends_cleanly(mortal_broker: Broker) -> None:
    storage = await written(mortal_broker.clients[0])
    with stopped(mortal_broker.process.pid):
        assert storage.park()
        mortal_broker.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(mortal_broker.process.wait, SETTLE_S) == 0
    assert mortal_broker.clients[0].participant == LEARNER
