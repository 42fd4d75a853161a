"""Waiting for GPU work without blocking an event loop."""

from __future__ import annotations

import asyncio

import torch


def recorded(stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
    """An event behind everything that was asked of a stream so far.

    Args:
        stream: None: the calling thread's current one.
    """
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream() if stream is None else stream)
    return event


async def finished(stream: torch.cuda.Stream | None = None) -> None:
    """Wait until everything that was asked of a stream so far has ended.

    To be awaited before a lease is sealed, and before a storage hold is released or published.

    Args:
        stream: None: the calling thread's current one, which is not the compute thread's.

    Raises:
        RuntimeError: the GPU work failed.
    """
    await over(recorded(stream))


async def over(event: torch.cuda.Event) -> None:
    """Wait for a recorded event; see `finished`."""
    if not event.query():
        await asyncio.to_thread(event.synchronize)
