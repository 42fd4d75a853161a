"""BrokerClient against a real broker process."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from common.errors import InvalidArgument, Stale
from common.ids import Epoch, GroupId, Participant, RunId, WeightsVersion
from common.tensors.errors import (
    ArenaFull,
    BrokerGone,
    BrokerTimeout,
    LeaseMisuse,
    StaleLease,
    StorageMismatch,
    StorageMisuse,
    StorageTorn,
)
from common.tensors.spec import DType, Held, TensorSpec
from common.tensors.storage import StorageSpec
from common.tensors.views import tensor_view
from common.tensors.wire import new_socket, send_packet
from protos.rollplex.v1 import broker_pb2 as pb
from tests.integration.broker.conftest import ARENA_BYTES, ENCODER, LEARNER, ROLLOUT, Broker
from tests.integration.broker.participant import inodes

if TYPE_CHECKING:
    from common.tensors.client import BrokerClient
    from common.tensors.lease import Lease

RUN = RunId("run")
PAGE = os.sysconf("SC_PAGESIZE")
VALUES = TensorSpec(name="values", dtype=DType.FLOAT32, shape=(4,))


async def allocate(
    client: BrokerClient, *consumers: Participant, size_bytes: int = 16, **fields
) -> Lease:
    tensor = TensorSpec(name="values", dtype=DType.UINT8, shape=(size_bytes,))
    return await client.allocate(
        run_id=RUN,
        epoch=fields.pop("epoch", Epoch(1)),
        group=GroupId(0),
        name="kv",
        tensors=[tensor],
        consumers=consumers,
        **fields,
    )


async def test_a_lease_from_allocation_to_free(broker: Broker) -> None:
    learner, encoder = broker.clients[0], await broker.join(ENCODER)
    specs = [VALUES, TensorSpec(name="count", dtype=DType.INT64, shape=())]
    lease = await encoder.allocate(
        run_id=RUN, epoch=Epoch(1), group=None, name="kv", tensors=specs, consumers=[LEARNER]
    )
    tensor_view(lease, "values").fill_(2.5)
    tensor_view(lease, "count").fill_(7)
    acquire = asyncio.create_task(learner.acquire([lease.id], epoch=Epoch(1)))
    lease.seal()
    with pytest.raises(LeaseMisuse, match="let go by this process"):
        lease.buffer("values")
    with pytest.raises(LeaseMisuse, match="sealed, abandoned or ended"):
        lease.seal()
    (held,) = await acquire
    assert (held.name, held.epoch, list(held.specs)) == ("kv", 1, ["values", "count"])
    assert tensor_view(held, "values").tolist() == [2.5] * 4
    assert tensor_view(held, "count").item() == 7
    assert learner.held_leases == [lease.id]
    held.release()
    held.release()
    assert learner.held_leases == []
    await broker.settle(0)
    with pytest.raises(StaleLease, match=r"its last consumer learner/0 released it"):
        await learner.acquire([lease.id], epoch=Epoch(1))


async def test_a_lease_left_behind_is_given_back(broker: Broker) -> None:
    learner, encoder = broker.clients[0], await broker.join(ENCODER)
    lease = await allocate(encoder, LEARNER)
    lease.seal()
    view = tensor_view((await learner.acquire([lease.id], epoch=Epoch(1)))[0], "values")
    del lease
    gc.collect()
    assert (await broker.ledger()).used_bytes == PAGE, "a tensor still refers to the bytes"
    del view
    gc.collect()
    await broker.settle(0)
    unsealed = await allocate(encoder, LEARNER)
    assert unsealed.held
    del unsealed
    gc.collect()
    await broker.settle(0)


async def test_one_way_calls_come_from_any_thread(broker: Broker) -> None:
    learner, encoder = broker.clients[0], await broker.join(ENCODER)
    for _ in range(20):
        lease = await allocate(encoder, LEARNER)
        sealing = threading.Thread(target=lease.seal)
        sealing.start()
        held = await learner.acquire([lease.id], epoch=Epoch(1))
        releasing = [threading.Thread(target=learner.release, args=(held,)) for _ in range(3)]
        for thread in releasing:
            thread.start()
        for thread in (sealing, *releasing):
            await asyncio.to_thread(thread.join)
    await broker.settle(0)
    assert not learner.closed.is_set()


async def test_an_epoch_ends_for_everybody(broker: Broker) -> None:
    learner, encoder = broker.clients[0], await broker.join(ENCODER)
    sealed = await allocate(encoder, LEARNER)
    sealed.seal()
    held = await learner.acquire([sealed.id], epoch=Epoch(1))
    unsealed = await allocate(encoder, LEARNER)
    waiting = asyncio.create_task(learner.acquire([unsealed.id], epoch=Epoch(1)))
    await asyncio.sleep(0.05)
    request = pb.AbortStepRequest(run_id="run", epoch=1, reason="rollout/0 died")
    await broker.stub.AbortStep(request)
    with pytest.raises(StaleLease, match="aborted: rollout/0 died"):
        await waiting
    with pytest.raises(StaleLease, match="aborted: rollout/0 died"):
        await allocate(encoder, LEARNER)
    assert (await broker.ledger()).used_bytes == 2 * PAGE, "both are still mapped"
    assert encoder.end_epoch(Epoch(1)) == 1
    assert learner.end_epoch(Epoch(0)) == 0
    assert learner.end_epoch(Epoch(1)) == 1
    await broker.settle(0)
    assert not held[0].held
    held[0].release()
    await broker.begin(2)
    with pytest.raises(Stale, match="was opened"):
        await broker.begin(1)
    (await allocate(encoder, LEARNER, epoch=Epoch(2))).abandon("a test")
    await broker.settle(0)


async def test_full_arena_shows_the_ledger(broker: Broker) -> None:
    learner, encoder = broker.clients[0], await broker.join(ENCODER)
    await learner.reserve(RUN, "activations", ARENA_BYTES // 2)
    with pytest.raises(ArenaFull, match="waiting cannot help") as caught:
        await allocate(encoder, LEARNER, size_bytes=ARENA_BYTES // 2 + 1)
    assert "activations" in caught.value.ledger
    assert "learner/0 gives it back" in caught.value.ledger
    large = await allocate(encoder, LEARNER, size_bytes=ARENA_BYTES // 2)
    with pytest.raises(ArenaFull, match="waiting was not wanted"):
        await allocate(encoder, LEARNER, wait=False)
    with pytest.raises(BrokerTimeout, match="no room in time"):
        await allocate(encoder, LEARNER, timeout_s=0.05)
    waiting = asyncio.create_task(allocate(encoder, LEARNER))
    await asyncio.sleep(0.02)
    large.abandon("a test")
    (await waiting).abandon("a test")
    await learner.reserve(RUN, "activations", 0)
    await broker.settle(0)


async def test_what_processes_hold_is_told_without_a_round_trip(broker: Broker) -> None:
    learner, encoder = broker.clients[0], await broker.join(ENCODER)
    learner.report_held(Held.CONTEXT, PAGE)
    await asyncio.to_thread(learner.report_held, Held.ALLOCATOR, ARENA_BYTES - 2 * PAGE)
    encoder.report_held(Held.ALLOCATOR, 3 * PAGE)
    await broker.held(ARENA_BYTES + 2 * PAGE)
    with pytest.raises(BrokerTimeout, match="no room in time") as caught:
        await allocate(encoder, LEARNER, timeout_s=0.05)
    assert "learner/0 returns it to the device" in str(caught.value)
    waiting = asyncio.create_task(allocate(encoder, LEARNER))
    await learner.close()
    lease = await waiting
    ledger = await broker.ledger()
    (arena,) = ledger.arenas
    assert arena.held_bytes == 3 * PAGE
    assert arena.peak_total_bytes == ARENA_BYTES + 2 * PAGE
    assert sum(entry.bytes for entry in ledger.entries) == arena.used_bytes + arena.held_bytes
    lease.abandon("a test")
    encoder.report_held(Held.ALLOCATOR, 0)
    await broker.held(0)


async def test_what_is_left_beside_what_processes_hold(broker: Broker) -> None:
    learner, encoder = broker.clients[0], await broker.join(ENCODER)
    assert await learner.room_beside(Held.ALLOCATOR, 2 * PAGE) == ARENA_BYTES - 2 * PAGE
    lease = await allocate(encoder, LEARNER)
    assert await encoder.room_beside(Held.ALLOCATOR, PAGE) == ARENA_BYTES - 4 * PAGE
    # What waits for room is spoken for.
    encoder.report_held(Held.ALLOCATOR, ARENA_BYTES - 5 * PAGE)
    waiting = asyncio.create_task(allocate(encoder, LEARNER, size_bytes=3 * PAGE))
    await broker.held(ARENA_BYTES - 3 * PAGE)
    assert await learner.room_beside(Held.ALLOCATOR, 2 * PAGE) == 0
    assert await encoder.room_beside(Held.ALLOCATOR, 0) == ARENA_BYTES - 6 * PAGE
    (await waiting).abandon("a test")
    lease.abandon("a test")
    await broker.settle(0)


async def test_cancelled_calls_take_nothing(broker: Broker) -> None:
    learner, encoder = broker.clients[0], await broker.join(ENCODER)
    lease = await allocate(encoder, LEARNER)
    for delay_s in (0.0, 0.02):
        acquire = asyncio.create_task(learner.acquire([lease.id], epoch=Epoch(1)))
        await asyncio.sleep(delay_s)
        acquire.cancel()
        await asyncio.gather(acquire, return_exceptions=True)
    lease.seal()
    (held,) = await learner.acquire([lease.id], epoch=Epoch(1))
    held.release()
    await broker.settle(0)
    # Cancelled while the reply is on its way: what it grants is given back.
    for _ in range(50):
        allocation = asyncio.create_task(allocate(encoder, LEARNER))
        await asyncio.sleep(0)
        allocation.cancel()
        await asyncio.gather(allocation, return_exceptions=True)
    await broker.settle(0)


def weights(*readers: Participant, size: int = 4) -> StorageSpec:
    tensor = TensorSpec(name="values", dtype=DType.FLOAT32, shape=(size,))
    return StorageSpec(tensors=(tensor,), readers=readers, writers=(LEARNER,))


async def test_versions_of_a_storage(broker: Broker) -> None:
    learner, rollout = broker.clients[0], await broker.join(ROLLOUT)
    attach = asyncio.create_task(rollout.open_storage(RUN, "weights"))
    written = await learner.open_storage(RUN, "weights", create=weights(ROLLOUT))
    assert (written.created, written.version, written.writable) == (True, None, True)
    read = await attach
    assert (read.created, read.writable) == (False, False)
    tensor, seen = tensor_view(written, "values"), tensor_view(read, "values")
    with pytest.raises(BrokerTimeout, match=r"a read hold of version 0 for rollout/0"):
        await read.hold_read(WeightsVersion(0), timeout_s=0.02)
    for version in (WeightsVersion(0), WeightsVersion(1)):
        hold = await written.hold_write(version)
        tensor.fill_(version + 1.5)
        await hold.publish()
        with await read.hold_read(version) as held:
            assert held.version == read.version == version
            assert seen.tolist() == [version + 1.5] * 4
    with await learner.open_storage(RUN, "again", create=weights()) and (
        await written.hold_exclusive(Epoch(1))
    ) as exclusive:
        assert not exclusive.dirty
        with pytest.raises(StorageMisuse, match="only a WRITE hold"):
            await exclusive.publish()
    with pytest.raises(StorageMismatch, match="exists, made by learner/0, and has for values"):
        await learner.open_storage(RUN, "weights", create=weights(ROLLOUT, size=5))
    (await written.hold_write(WeightsVersion(2))).release(untouched=True)
    (await read.hold_read(WeightsVersion(1))).release()
    (await written.hold_write(WeightsVersion(2))).release()
    with pytest.raises(StorageTorn, match="gave up writing version 2"):
        await read.hold_read(WeightsVersion(1))


async def test_cancelled_writer_leaves_nothing_torn(broker: Broker) -> None:
    learner, rollout = broker.clients[0], await broker.join(ROLLOUT)
    storage = await learner.open_storage(RUN, "weights", create=weights(ROLLOUT))
    await (await storage.hold_write(WeightsVersion(0))).publish()
    read = await (await rollout.open_storage(RUN, "weights")).hold_read(WeightsVersion(0))
    writer = asyncio.create_task(storage.hold_write(WeightsVersion(1)))
    await asyncio.sleep(0.02)
    read.release()
    writer.cancel()
    await asyncio.gather(writer, return_exceptions=True)
    (await storage.hold_read(WeightsVersion(0))).release()


async def test_a_second_join_replaces_the_first(broker: Broker) -> None:
    first = broker.clients[0]
    lease = await allocate(first, ENCODER)
    second = await broker.join(LEARNER)
    async with asyncio.timeout(10):
        await first.closed.wait()
    assert second.broker_incarnation == first.broker_incarnation
    await broker.settle(0)
    lease.abandon("too late: the connection is gone")
    with pytest.raises(BrokerGone):
        await first.acquire([lease.id], epoch=Epoch(1))


async def test_bad_one_way_message_ends_the_connection(broker: Broker) -> None:
    learner, encoder = broker.clients[0], await broker.join(ENCODER)
    lease = await allocate(encoder, LEARNER)
    learner._connection.tell(pb.BrokerRequest(release=pb.Release(lease_ids=[lease.id])))
    async with asyncio.timeout(10):
        await learner.closed.wait()
    told = f"learner/0 releases lease {lease.id} (kv), which it does not hold"
    assert told in broker.started.log
    assert not encoder.closed.is_set()


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff no protobuf",
        pb.BrokerRequest(request_id=1, release=pb.Release()).SerializeToString(),
        b"\0" * (200 * 1024),
    ],
    ids=["garbage", "no join", "too long"],
)
async def test_strangers_are_shown_out(broker: Broker, data: bytes) -> None:
    with new_socket() as stranger:
        stranger.connect(str(broker.deployment.broker_socket))
        send_packet(stranger, data)
        async with asyncio.timeout(10):
            assert await asyncio.get_running_loop().sock_recv(stranger, 100) == b""
    await broker.clients[0].reserve(RUN, "still alive", 0)


async def test_requests_that_do_not_fit_a_packet_are_refused_here(broker: Broker) -> None:
    tensors = [TensorSpec(name="x" * 1000 + str(i), dtype=DType.BOOL, shape=()) for i in range(200)]
    with pytest.raises(InvalidArgument, match=r"allocate request takes \d+ bytes"):
        await broker.clients[0].allocate(
            run_id=RUN, epoch=Epoch(1), group=None, name="kv", tensors=tensors, consumers=[ENCODER]
        )


async def test_the_socket_is_private(broker: Broker) -> None:
    assert broker.deployment.broker_socket.stat().st_mode & 0o777 == 0o600


async def test_cycles_leave_nothing_behind(broker: Broker) -> None:
    learner, encoder = broker.clients[0], await broker.join(ENCODER)

    async def cycle() -> None:
        lease = await allocate(encoder, LEARNER, size_bytes=PAGE * 4)
        lease.buffer("values")[0] = 1
        lease.seal()
        for held in await learner.acquire([lease.id], epoch=Epoch(1)):
            held.release()

    def shm_mappings() -> int:
        """Of these two processes: those of tests that run beside this one come and go."""
        maps = (Path(f"/proc/{pid}/maps") for pid in (os.getpid(), broker.process.pid))
        return sum(each.read_text().count("/dev/shm/") for each in maps)

    await cycle()
    await broker.settle(0)
    shm_before = shm_mappings()
    fds_before, own_fds_before = broker.fds, len(os.listdir("/proc/self/fd"))
    for _ in range(300):
        await cycle()
    await broker.settle(0)
    # Fewer are no leak: connections of the tests before may have been closing.
    assert broker.fds <= fds_before
    assert len(os.listdir("/proc/self/fd")) <= own_fds_before
    assert not inodes("rollplex:kv"), "a mapping outlived its lease"
    assert shm_mappings() <= shm_before
    ledger = await broker.ledger()
    assert (ledger.used_bytes, list(ledger.entries)) == (0, [])
