"""GPU memory over time, as the driver and as the broker's ledger see it."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollplex.client import Client

EVERY_S = 0.1


@dataclass(slots=True, kw_only=True)
class MemoryTrace:
    """Samples in order of time, on the node's monotonic clock.

    Attributes:
        times_s: of the samples.
        device_bytes: in use on the GPU by all processes; empty on a CPU.
        ledger_bytes: handed out or reserved by the broker in the arena that workers compute in,
            with what the processes' allocators and contexts hold of it.
        held_bytes: the latter alone.
    """

    times_s: list[float] = field(default_factory=list)
    device_bytes: list[int] = field(default_factory=list)
    ledger_bytes: list[int] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)

    def peak(self, values: list[int], start_s: float, end_s: float) -> int | None:
        """Largest of `values` between two times; None: there is none."""
        inside = [
            value
            for time_s, value in zip(self.times_s, values, strict=False)
            if start_s <= time_s <= end_s
        ]
        return max(inside, default=None)


@asynccontextmanager
async def memory_trace(client: Client, *, device: str) -> AsyncIterator[MemoryTrace]:
    """Sample until the block ends.

    Args:
        device: `cuda`: sample the first GPU too.
    """
    trace = MemoryTrace()
    gpu = _Gpu() if device == "cuda" else None
    sampling = asyncio.create_task(_sample(trace, client, gpu))
    try:
        yield trace
    finally:
        sampling.cancel()
        await asyncio.wait({sampling})
        if not sampling.cancelled() and (error := sampling.exception()) is not None:
            raise error


async def _sample(trace: MemoryTrace, client: Client, gpu: _Gpu | None) -> None:
    while True:
        arena = (await client.ledger()).arena()
        trace.times_s.append(time.monotonic())
        trace.ledger_bytes.append(arena.total_bytes)
        trace.held_bytes.append(arena.held_bytes)
        if gpu is not None:
            trace.device_bytes.append(gpu.used_bytes())
        await asyncio.sleep(EVERY_S)


class _Gpu:
    """The first GPU that this process sees, through the management library."""

    def __init__(self) -> None:
        import pynvml

        from common.gpu.driver import device_uuid

        pynvml.nvmlInit()
        self._library = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(device_uuid(0))

    def used_bytes(self) -> int:
        """In use by all processes and the driver."""
        return int(self._library.nvmlDeviceGetMemoryInfo(self._handle).used)
