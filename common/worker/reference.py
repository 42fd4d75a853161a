"""The reference's weights in one process that reads them, through one epoch.

Invariants:
- While a job may read them, this process holds them, or its epoch has ended and the job has not
  begun.
- Where they can be spilled, they are parked here once `reference_weights_needed` says no and no job
  is left, and called back as soon as it says yes. A job that comes before they are back waits.
- What an epoch that failed has left mapped, the beginning of the next one parks or keeps.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from common.step.reference_use import reference_weights_needed
from common.worker.weights import REFERENCE_VERSION

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from common.step.tasks import Task
    from common.tensors.storage import Hold, Storage
    from common.worker.scope import StepScope


class ReferenceWeights:
    """Of one epoch; what is still held at its end, its scope gives back."""

    def __init__(self, scope: StepScope, storage: Storage | None, *, task: Task) -> None:
        """Begin an epoch: call spilled weights back, or let them go.

        Args:
            storage: None: the run has no reference.
            task: the task that reads them, one of a lane that runs one task at a time.
        """
        self._scope = scope
        self._storage = storage
        self._task = task
        self._hold: Hold | None = None
        self._jobs = 0
        self._kept: bool | None = None
        """Whether they are to stay; None: nothing was decided yet."""
        self.advance()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Hold the weights for a job; waits until they are on their device.

        A block that is left by an error may leave its job running: the hold ends with the scope.
        """
        self._jobs += 1
        if self._hold is None and self._storage is not None:
            self._hold = await self._scope.read(self._storage, REFERENCE_VERSION)
        yield
        self._jobs -= 1
        self.advance()

    def advance(self) -> None:
        """An event was folded into the view, or a job has ended."""
        if self._storage is None or not self._storage.spillable:
            return
        needed = reference_weights_needed(self._scope.view)
        if needed and not self._kept:
            self._kept = True
            self._storage.prefetch()
        elif not (needed or self._jobs or (self._kept is False and self._hold is None)):
            self._kept = False
            if self._hold is not None:
                hold, self._hold = self._hold, None
                self._scope.give_back(hold)
            self._scope.spawn(self._task, self._park)

    async def _park(self) -> None:
        await self._scope.between_jobs(self._park_unless_kept)

    def _park_unless_kept(self) -> None:
        if self._storage is not None and not self._kept:
            self._storage.park()
