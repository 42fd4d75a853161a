"""What a worker tells the ledger of its own allocator and context; on a real broker."""

from __future__ import annotations

import dataclasses

import torch

from common.ids import Participant, Service
from common.tensors.spec import Held
from common.worker.device import WorkerDevice
from common.worker.own_memory import STEP_BYTES, OwnMemory, reserved_bytes
from tests.unit.worker.conftest import CPU, ENCODER, RUN

MIB = 1 << 20
ROLLOUT = Participant(service=Service.ROLLOUT)


class Allocator:
    """How much it has, as the test says."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def __call__(self) -> int:
        return self.size_bytes


async def rows(broker):
    """What processes hold by their name and kind, and how much that is by the totals."""
    ledger = await broker.ledger()
    held = {(e.producer, e.name): e.bytes for e in ledger.entries if e.state == "held"}
    assert sum(held.values()) == ledger.arenas[0].held_bytes
    return held


async def test_the_first_look_and_changes_that_count(broker):
    client = await broker.join(ENCODER)
    allocator = Allocator(1000 * MIB)
    device = dataclasses.replace(CPU, context_bytes=300 * MIB)
    own = OwnMemory(client, device, reserved=allocator)
    await broker.held(1300 * MIB)
    assert await rows(broker) == {
        ("prefix-encoder/0", "allocator"): 1000 * MIB,
        ("prefix-encoder/0", "context"): 300 * MIB,
    }
    # Too small a change is not told; the next one is, and comes after it in order.
    allocator.size_bytes = 1010 * MIB
    own.look()
    allocator.size_bytes = 1011 * MIB
    own.look()
    await broker.held(1311 * MIB)
    allocator.size_bytes = 10_000 * MIB
    own.look()
    await broker.held(10_300 * MIB)
    allocator.size_bytes += STEP_BYTES
    own.look()
    allocator.size_bytes += STEP_BYTES + 1
    own.look()
    await broker.held(10_300 * MIB + 2 * STEP_BYTES + 1)
    allocator.size_bytes = 0
    own.give_back()
    await broker.held(300 * MIB)
    assert await rows(broker) == {("prefix-encoder/0", "context"): 300 * MIB}
    await client.close()
    await broker.held(0)


async def test_a_cpu_has_nothing_to_tell(broker):
    client = await broker.join(ENCODER)
    OwnMemory(client, CPU).look()
    assert reserved_bytes(torch.device("cpu")) == 0
    assert WorkerDevice(torch=torch.device("cpu"), uuid="").context_bytes == 0
    # Answered behind the look's message, were there one.
    await client.reserve(RUN, "activations", 0)
    assert await rows(broker) == {}


async def test_a_budget_limits_the_allocator(broker, monkeypatch):
    limits = []
    monkeypatch.setattr(WorkerDevice, "limit", lambda self, size_bytes: limits.append(size_bytes))
    client, other = await broker.join(ENCODER), await broker.join(ROLLOUT)
    allocator = Allocator(8 * MIB)
    own = OwnMemory(client, CPU, reserved=allocator)
    await own.keep_to_budget()
    assert limits == []
    budgeted = dataclasses.replace(CPU, budgeted=True)
    own = OwnMemory(client, budgeted, reserved=allocator)
    await own.keep_to_budget()
    (arena,) = (await broker.ledger()).arenas
    assert limits == [arena.capacity_bytes]
    other.report_held(Held.ALLOCATOR, 10 * MIB)
    await broker.held(18 * MIB)
    allocator.size_bytes = 4 * MIB
    await own.keep_to_budget()
    assert limits[1:] == [arena.capacity_bytes - 10 * MIB]
    assert await rows(broker) == {
        ("prefix-encoder/0", "allocator"): 4 * MIB,
        ("rollout/0", "allocator"): 10 * MIB,
    }
    # It is told already.
    own.look()
    await client.reserve(RUN, "activations", 0)
    await broker.held(14 * MIB)


async def test_jobs_and_ends_of_epochs_tell(worker, script, broker, monkeypatch):
    allocator = Allocator(0)
    monkeypatch.setattr("common.worker.own_memory.reserved_bytes", lambda _: allocator())
    seen = []

    async def work(scope, group):
        def job():
            allocator.size_bytes = (group + 1) * 100 * MIB

        await scope.run("prepare", job)
        await broker.held((group + 1) * 100 * MIB)
        seen.append(await rows(broker))

        def less():
            allocator.size_bytes = 7 * MIB

        await scope.between_jobs(less)
        await broker.held(7 * MIB)

    script.work = work
    await worker.configure()
    await worker.begin(2, groups=1)
    await worker.until(lambda: bool(seen))
    assert seen == [{("prefix-encoder/0", "allocator"): 100 * MIB}]
    await broker.held(7 * MIB)
    allocator.size_bytes = 5 * MIB
    await worker.abort(2)
    await broker.held(5 * MIB)
    allocator.size_bytes = 3 * MIB
    await worker.release()
    await broker.held(0)
    allocator.size_bytes = 2 * MIB
    await worker.configure(epoch=2)
    await broker.held(2 * MIB)
