"""Writes to the ledger, one after the other, in the order in which they were asked for."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

from common.registry.connection import RedisRefused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

_REFUSED_PAUSE_S = 1.0


class LedgerLane:
    """A queue of writes. Nothing is skipped: a write that Redis or the disk refuses is repeated.

    `Stale` is not: another controller has taken over, and `run` raises it.
    """

    def __init__(self) -> None:
        self._writes: deque[Callable[[], Awaitable[None]]] = deque()
        self._wake = asyncio.Event()

    def submit(self, write: Callable[[], Awaitable[None]]) -> None:
        """Queue a write that may be repeated."""
        self._writes.append(write)
        self._wake.set()

    async def flushed(self) -> None:
        """Wait until everything submitted so far is on disk."""
        done = asyncio.Event()

        async def mark() -> None:
            done.set()

        self.submit(mark)
        await done.wait()

    async def run(self) -> None:
        """Write for ever. Raises Stale when another controller has taken over."""
        while True:
            while not self._writes:
                self._wake.clear()
                await self._wake.wait()
            await self._write(self._writes[0])
            self._writes.popleft()

    async def _write(self, write: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await write()
            except (RedisRefused, OSError) as error:
                log.warning("a write was refused; it is repeated", extra={"cause": str(error)})
                await asyncio.sleep(_REFUSED_PAUSE_S)
            else:
                return
