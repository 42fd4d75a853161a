"""The broker's memory by generation: made, handed out, spilled, restored, freed.

Copies between a device and the host run beside the event loop, in one thread a direction, as a link
carries both at once. Each ends in exactly one event. Memory that is freed while it is being copied
goes when the copy ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from services.broker.arena import SpillingArena
from services.broker.events import MemoryRestored, MemorySpilled, MoveFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from services.broker.arena import Allocation, Arena, Export, HostCopy
    from services.broker.events import Generation, MoveEnded
    from services.broker.instructions import CreateMemory

log = logging.getLogger(__name__)


class CopyMeter(Protocol):
    """Who is told of copies that have ended."""

    def spilled(self, size_bytes: int, seconds: float) -> None:
        """Contents have gone to the host's memory."""

    def restored(self, size_bytes: int, seconds: float) -> None:
        """Contents have come back."""


@dataclass(slots=True, kw_only=True)
class _Piece:
    arena: Arena
    name: str
    allocation: Allocation | None
    """None: its contents are in the copy."""
    copy: HostCopy | None = None
    moving: bool = False
    freed: bool = False


class Memory:
    """See the module's text. Its methods are for the event loop's thread.

    Args:
        ended: told of each move's end, on the event loop.
        broken: told of a failure other than a lack of memory, on the event loop.
    """

    def __init__(
        self,
        arenas: Iterable[Arena],
        *,
        ended: Callable[[MoveEnded], None],
        broken: Callable[[Exception], None],
        meter: CopyMeter | None,
    ) -> None:
        self._arenas = {arena.device: arena for arena in arenas}
        self._ended = ended
        self._broken = broken
        self._meter = meter
        self._pieces: dict[Generation, _Piece] = {}
        self._closed = False
        self._out = ThreadPoolExecutor(1, thread_name_prefix="spilling")
        self._back = ThreadPoolExecutor(1, thread_name_prefix="restoring")

    def create(self, order: CreateMemory) -> None:
        """Make memory. Raises OSError if the system has none."""
        arena = self._arenas[order.device]
        allocation = arena.allocate(order.size_bytes, order.name, zeroed=order.zeroed)
        self._pieces[order.generation] = _Piece(arena=arena, name=order.name, allocation=allocation)

    def export(self, generation: Generation, *, writable: bool) -> Export:
        """A way for another process to map it. Raises OSError without a descriptor for it."""
        allocation = self._pieces[generation].allocation
        assert allocation is not None
        return allocation.export(writable=writable)

    def free(self, generation: Generation) -> None:
        """Let the memory go, on the device and in the host's memory."""
        piece = self._pieces.pop(generation)
        piece.freed = True
        if not piece.moving:
            self._let_go(piece)

    def spill(self, generation: Generation, *, copied: bool) -> None:
        """Begin to copy the contents to the host; nobody has them mapped.

        Args: copied: the host has them already, from an earlier spill.
        """
        self._move(self._out, generation, self._let_device_go if copied else self._write_out)

    def restore(self, generation: Generation) -> None:
        """Begin to copy the contents back to the device."""
        self._move(self._back, generation, self._read_back)

    def close(self) -> None:
        """Give everything back, once the copies that run have ended. Blocks. Idempotent."""
        self._closed = True
        self._out.shutdown(wait=True)
        self._back.shutdown(wait=True)
        for piece in self._pieces.values():
            piece.moving = False
        for generation in list(self._pieces):
            self.free(generation)

    def _move(
        self,
        thread: ThreadPoolExecutor,
        generation: Generation,
        move: Callable[[Generation, _Piece], MoveEnded],
    ) -> None:
        piece, loop = self._pieces[generation], asyncio.get_running_loop()
        piece.moving = True

        def job() -> None:
            if self._closed:
                return
            try:
                event = (
                    _failed(generation, f"{piece.name} was freed before its turn")
                    if piece.freed
                    else move(generation, piece)
                )
            except Exception as error:  # noqa: BLE001 - a device that failed ends the process
                _call(loop, self._broken, error)
            else:
                _call(loop, self._moved, piece, event)

        thread.submit(job)

    def _moved(self, piece: _Piece, event: MoveEnded) -> None:
        piece.moving = False
        if piece.freed:
            self._let_go(piece)
        if not self._closed:
            self._ended(replace(event, at_ns=time.monotonic_ns()))

    def _write_out(self, generation: Generation, piece: _Piece) -> MoveEnded:
        arena, allocation = piece.arena, piece.allocation
        assert isinstance(arena, SpillingArena)
        assert allocation is not None
        try:
            if piece.copy is None:
                piece.copy = arena.new_copy(allocation.size_bytes)
        except OSError as error:
            return _failed(generation, f"{piece.name} stays on {arena.device}: {error}")
        start_s = time.monotonic()
        arena.write_out(allocation, piece.copy)
        if self._meter is not None:
            self._meter.spilled(allocation.size_bytes, time.monotonic() - start_s)
        return self._let_device_go(generation, piece, start_s=start_s)

    def _let_device_go(
        self, generation: Generation, piece: _Piece, *, start_s: float | None = None
    ) -> MoveEnded:
        """Args: start_s: when the spill began; None: now."""
        start_s = time.monotonic() if start_s is None else start_s
        allocation, piece.allocation = piece.allocation, None
        assert allocation is not None
        piece.arena.free(allocation)
        seconds = time.monotonic() - start_s
        _log_moved("contents spilled", piece, seconds)
        return MemorySpilled(at_ns=time.monotonic_ns(), generation=generation, seconds=seconds)

    def _read_back(self, generation: Generation, piece: _Piece) -> MoveEnded:
        arena, copy = piece.arena, piece.copy
        assert isinstance(arena, SpillingArena)
        assert copy is not None
        start_s = time.monotonic()
        try:
            piece.allocation = arena.read_back(copy, piece.name)
        except OSError as error:
            return _failed(generation, f"{piece.name} waits for {arena.device}: {error}")
        seconds = time.monotonic() - start_s
        if self._meter is not None:
            self._meter.restored(copy.size_bytes, seconds)
        _log_moved("contents restored", piece, seconds)
        return MemoryRestored(at_ns=time.monotonic_ns(), generation=generation, seconds=seconds)

    def _let_go(self, piece: _Piece) -> None:
        allocation, piece.allocation = piece.allocation, None
        copy, piece.copy = piece.copy, None
        if allocation is not None:
            piece.arena.free(allocation)
        if copy is None:
            return
        try:
            self._out.submit(copy.free)
        except RuntimeError:
            copy.free()  # the thread has ended


def _log_moved(what: str, piece: _Piece, seconds: float) -> None:
    extra = {"storage": piece.name, "device": piece.arena.device, "seconds": round(seconds, 3)}
    log.info(what, extra=extra)


def _failed(generation: Generation, reason: str) -> MoveFailed:
    log.info("contents not moved", extra={"reason": reason})
    return MoveFailed(at_ns=time.monotonic_ns(), generation=generation, reason=reason)


def _call(loop: asyncio.AbstractEventLoop, what: Callable[..., None], *values: object) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(what, *values)
