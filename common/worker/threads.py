"""Blocking jobs beside the event loop that are never left behind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


async def in_thread(job: Callable[[], T], *, unwanted: Callable[[T], None] | None = None) -> T:
    """Run a blocking job in a thread; a cancellation takes effect only when the job has ended.

    So whoever cancels a task and waits for its end may use what the job wrote to.

    Args: unwanted: gives up what the job has returned, where the cancellation keeps it from the
        caller.
    """
    running = asyncio.ensure_future(asyncio.to_thread(job))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        # Its error, if it had one, is not wanted any more.
        if not running.cancelled() and running.exception() is None and unwanted is not None:
            unwanted(running.result())
        raise
