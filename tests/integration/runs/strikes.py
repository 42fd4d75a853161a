"""SIGKILL at a moment that is certain: the process that could end the moment is held still, the
moment is looked at once more, and only then the victim is killed. A moment that has passed is
waited for again, in a later step.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from tests.integration.runs.node import children, gone, send

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from tests.integration.runs.node import Node

MOMENT_S = 60.0
"""Longest wait for a moment, over as many steps as it takes."""
SETTLE_S = 0.05
"""What was on its way when a process was stopped is here after this."""
ORPHANS_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """One kill: whom, when, and in which step and epoch."""

    victim: str
    moment: str
    step: int
    epoch: int


async def until(holds: Callable[[], Awaitable[bool]], *, within_s: float = MOMENT_S) -> None:
    """Look again and again until it is so."""
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + within_s
    while not await holds():
        assert loop.time() < give_up_s, f"{holds} did not come within {within_s} s"
        await asyncio.sleep(0.001)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Hold a process still for the length of the block; it may be killed inside."""
    send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if psutil.pid_exists(pid):
            send(pid, signal.SIGCONT)


@asynccontextmanager
async def still(node: Node, name: str, holds: Callable[[], Awaitable[bool]]) -> AsyncIterator[None]:
    """Wait for a moment and hold the process that could end it still in it."""
    give_up_s = asyncio.get_running_loop().time() + MOMENT_S
    while True:
        await until(holds)
        with stopped(node.pid(name)):
            await asyncio.sleep(SETTLE_S)
            if await holds():
                yield
                return
        assert asyncio.get_running_loop().time() < give_up_s, f"{name} was never caught in time"


async def kill(node: Node, name: str) -> int:
    """SIGKILL, once it runs; none of its own processes may outlive it. Returns: its pid."""

    async def runs() -> bool:
        return node.pid(name) != 0

    # One that is killed again and again is started again more and more slowly.
    await until(runs)
    pid = node.pid(name)
    below = children(pid)
    send(pid, signal.SIGKILL)
    left = await gone({pid, *below}, within_s=ORPHANS_S)
    assert not left, f"{len(left)} processes outlived {name}: {left}"
    return pid
