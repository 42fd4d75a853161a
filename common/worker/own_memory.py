"""Keeps the ledger informed of what this process has taken of its device itself."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from common.tensors.spec import Held

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.tensors.client import BrokerClient
    from common.worker.device import WorkerDevice

STEP_BYTES = 64 << 20
STEP_SHARE = 0.01
"""A change is told once it is larger than one of the two, the latter of what was told last."""


class OwnMemory:
    """For one connection to the broker. Any thread.

    Args:
        reserved: bytes that the process's allocator has of the device; None: torch's, which has
            none of a CPU.
    """

    def __init__(
        self,
        broker: BrokerClient,
        device: WorkerDevice,
        *,
        reserved: Callable[[], int] | None = None,
    ) -> None:
        """Tell what there is now."""
        self._broker = broker
        self._device = device
        self._reserved = reserved or (lambda: reserved_bytes(device.torch))
        self._lock = threading.Lock()
        self._told_bytes = 0
        self.most_bytes: int | None = None
        """What the allocator may have of the device by the node's budget; None: all of it."""
        if device.context_bytes:
            broker.report_held(Held.CONTEXT, device.context_bytes)
        self.look()

    def look(self) -> None:
        """Tell of a change that counts. Takes microseconds."""
        with self._lock:
            now_bytes = self._reserved()
            change = abs(now_bytes - self._told_bytes)
            if change > min(STEP_BYTES, STEP_SHARE * self._told_bytes):
                self._broker.report_held(Held.ALLOCATOR, now_bytes)
                self._told_bytes = now_bytes

    async def keep_to_budget(self) -> None:
        """Limit the allocator to what it has and what the node's budget leaves, if it is limited.

        Before each job: what others have taken or returned meanwhile is counted.
        """
        if not self._device.budgeted:
            return
        now_bytes = self._reserved()
        left_bytes = await self._broker.room_beside(Held.ALLOCATOR, now_bytes)
        with self._lock:
            self._told_bytes = now_bytes
        self.most_bytes = now_bytes + left_bytes
        self._device.limit(self.most_bytes)

    def give_back(self) -> None:
        """Return what is cached and not in use to the device, and tell."""
        self._device.give_back()
        self.look()


def reserved_bytes(device: torch.device) -> int:
    """What torch's allocator has of a device, in use or not; 0 of a CPU."""
    if device.type != "cuda":
        return 0
    # `memory_reserved` flattens and sorts all statistics first, for every job.
    statistics = torch.cuda.memory.memory_stats_as_nested_dict(device)
    return int(statistics["reserved_bytes"]["all"]["current"]) if statistics else 0
