"""Memory that is copied beside the event loop: what ends a copy, and what goes on meanwhile."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING

import pytest

from services.broker.arena import Allocation, HostCopy, MemfdAllocation, MemfdArena, PrivateMemory
from services.broker.events import Generation, MemoryRestored, MemorySpilled, MoveFailed
from services.broker.instructions import CreateMemory
from services.broker.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.broker.events import MoveEnded

PIECE, OTHER = Generation(7), Generation(8)
SIZE_BYTES = 40 << 20
"""More than one part of a copy."""
PATTERN = bytes(range(251))


class GatedArena(MemfdArena):
    """An arena whose copies wait, and which counts what it has given out."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.out = 0
        self.copies = 0
        self.failure: Exception | None = None

    def allocate(self, size_bytes: int, name: str, *, zeroed: bool) -> MemfdAllocation:
        self.out += 1
        return super().allocate(size_bytes, name, zeroed=zeroed)

    def free(self, allocation: Allocation) -> None:
        super().free(allocation)
        self.out -= 1

    def new_copy(self, size_bytes: int) -> PrivateMemory:
        if self.failure is not None:
            raise self.failure
        self.copies += 1
        arena = self

        class Counted(PrivateMemory):
            def free(self) -> None:
                super().free()
                arena.copies -= 1

        return Counted(size_bytes)

    def write_out(self, allocation: Allocation, copy: HostCopy) -> None:
        self.begun.set()
        assert self.gate.wait(20)
        super().write_out(allocation, copy)

    def read_back(self, copy: HostCopy, name: str) -> MemfdAllocation:
        if self.failure is not None:
            raise self.failure
        return super().read_back(copy, name)


class Kept:
    """A memory with one piece in it, and what it has reported."""

    def __init__(self) -> None:
        self.arena = GatedArena()
        self.reports: asyncio.Queue[MoveEnded | Exception] = asyncio.Queue()
        self.sizes: list[tuple[str, int]] = []
        self.memory = Memory(
            [self.arena],
            ended=self.reports.put_nowait,
            broken=self.reports.put_nowait,
            meter=self,
        )
        order = CreateMemory(
            generation=PIECE, device="cpu", size_bytes=SIZE_BYTES, name="weights", zeroed=True
        )
        self.memory.create(order)
        self.whole = (PATTERN * (SIZE_BYTES // len(PATTERN) + 1))[:SIZE_BYTES]
        descriptor = self.descriptor()
        assert os.pwrite(descriptor, self.whole, 0) == SIZE_BYTES
        os.close(descriptor)

    def spilled(self, size_bytes: int, seconds: float) -> None:
        self.sizes.append(("spilled", size_bytes))

    def restored(self, size_bytes: int, seconds: float) -> None:
        self.sizes.append(("restored", size_bytes))

    def descriptor(self) -> int:
        descriptor = self.memory.export(PIECE, writable=True).fd
        assert descriptor is not None
        return descriptor

    async def report(self) -> MoveEnded | Exception:
        async with asyncio.timeout(20):
            return await self.reports.get()


@pytest.fixture
def kept() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    kept.memory.close()
    kept.memory.close()
    assert (kept.arena.out, kept.arena.copies) == (0, 0)


async def test_there_and_back_bit_for_bit(kept: Kept) -> None:
    for _ in range(2):
        kept.memory.spill(PIECE, copied=False)
        assert isinstance(await kept.report(), MemorySpilled)
        assert (kept.arena.out, kept.arena.copies) == (0, 1)
        kept.memory.restore(PIECE)
        assert isinstance(await kept.report(), MemoryRestored)
        descriptor = kept.descriptor()
        assert os.pread(descriptor, SIZE_BYTES, 0) == kept.whole
        os.close(descriptor)
    assert kept.sizes == [("spilled", SIZE_BYTES), ("restored", SIZE_BYTES)] * 2


async def test_what_the_host_has_already_is_let_go_without_a_copy(kept: Kept) -> None:
    kept.memory.spill(PIECE, copied=False)
    await kept.report()
    kept.memory.restore(PIECE)
    await kept.report()
    kept.arena.begun.clear()
    kept.memory.spill(PIECE, copied=True)
    spilled = await kept.report()
    assert isinstance(spilled, MemorySpilled)
    assert not kept.arena.begun.is_set()
    assert (kept.arena.out, kept.arena.copies) == (0, 1)
    kept.memory.restore(PIECE)
    restored = await kept.report()
    assert isinstance(restored, MemoryRestored)
    assert restored.seconds > 0
    descriptor = kept.descriptor()
    assert os.pread(descriptor, SIZE_BYTES, 0) == kept.whole
    os.close(descriptor)
    # Only what was copied is counted.
    assert kept.sizes == [
        ("spilled", SIZE_BYTES),
        ("restored", SIZE_BYTES),
        ("restored", SIZE_BYTES),
    ]


async def test_the_loop_goes_on_while_it_is_copied(kept: Kept) -> None:
    kept.arena.gate.clear()
    kept.memory.spill(PIECE, copied=False)
    assert await asyncio.to_thread(kept.arena.begun.wait, 20)
    assert kept.reports.empty()
    kept.arena.gate.set()
    assert isinstance(await kept.report(), MemorySpilled)


async def test_contents_come_back_while_others_leave(kept: Kept) -> None:
    kept.memory.spill(PIECE, copied=False)
    await kept.report()
    kept.memory.create(
        CreateMemory(generation=OTHER, device="cpu", size_bytes=4096, name="other", zeroed=True)
    )
    kept.arena.gate.clear()
    kept.arena.begun.clear()
    kept.memory.spill(OTHER, copied=False)
    assert await asyncio.to_thread(kept.arena.begun.wait, 20)
    kept.memory.restore(PIECE)
    restored = await kept.report()
    assert isinstance(restored, MemoryRestored)
    assert restored.generation == PIECE
    kept.arena.gate.set()
    assert isinstance(await kept.report(), MemorySpilled)


async def test_what_is_freed_while_it_is_copied_goes_afterwards(kept: Kept) -> None:
    kept.arena.gate.clear()
    kept.memory.spill(PIECE, copied=False)
    assert await asyncio.to_thread(kept.arena.begun.wait, 20)
    kept.memory.free(PIECE)
    assert (kept.arena.out, kept.arena.copies) == (1, 1)
    kept.arena.gate.set()
    await kept.report()
    kept.memory.close()
    assert (kept.arena.out, kept.arena.copies) == (0, 0)


async def test_the_end_waits_for_the_copy(kept: Kept) -> None:
    kept.arena.gate.clear()
    kept.memory.spill(PIECE, copied=False)
    assert await asyncio.to_thread(kept.arena.begun.wait, 20)
    threading.Timer(0, kept.arena.gate.set).start()
    kept.memory.close()
    assert (kept.arena.out, kept.arena.copies) == (0, 0)
    await asyncio.sleep(0)
    assert kept.reports.empty()


async def test_no_memory_is_an_event_and_harms_nothing(kept: Kept) -> None:
    kept.arena.failure = OSError("Cannot allocate memory")
    kept.memory.spill(PIECE, copied=False)
    failed = await kept.report()
    assert isinstance(failed, MoveFailed)
    assert failed.reason == "weights stays on cpu: Cannot allocate memory"
    kept.arena.failure = None
    kept.memory.spill(PIECE, copied=False)
    await kept.report()
    kept.arena.failure = OSError("Cannot allocate memory")
    kept.memory.restore(PIECE)
    failed = await kept.report()
    assert isinstance(failed, MoveFailed)
    assert failed.reason == "weights waits for cpu: Cannot allocate memory"
    kept.arena.failure = None
    kept.memory.restore(PIECE)
    assert isinstance(await kept.report(), MemoryRestored)


async def test_any_other_failure_is_the_brokers(kept: Kept) -> None:
    kept.arena.failure = RuntimeError("an illegal address")
    kept.memory.spill(PIECE, copied=False)
    assert await kept.report() is kept.arena.failure
