"""What of the run's storages left the device in a step and came back, and how long that took."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from common.events import bodies
from common.tensors.parts import RANK, whole_of

if TYPE_CHECKING:
    from common.events import Event
    from common.step.plan import StepPlan


class MoveTally:
    """Of one epoch, folded from its events; repeated ones and those of others change nothing."""

    def __init__(self, plan: StepPlan | None) -> None:
        """Args: plan: of the epoch; None: of none, nothing is counted."""
        self._plan = plan
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._seen: set[str] = set()

    def apply(self, event: Event) -> None:
        """Fold one event in; most are about something else."""
        moved, plan = event.body, self._plan
        if not isinstance(moved, bodies.ContentsMoved) or event.event_id in self._seen:
            return
        if plan is None or (event.run_id, event.epoch) != (plan.run_id, plan.epoch):
            return
        self._seen.add(event.event_id)
        name, _, _ = whole_of(moved.storage).partition(RANK)
        name = name.replace(".", "_")
        done, doing = ("restored", "restore") if moved.restored else ("spilled", "spill")
        self._sums[f"{name}_{done}_bytes"] += moved.size_bytes
        self._sums[f"time_{name}_{doing}_s"] += moved.seconds

    def metrics(self, late: MoveTally) -> dict[str, float]:
        """By storage, such as `reference_weights_restored_bytes`, of all parts and ranks;
        nothing for what did not move.

        Args: late: what ended after the record of the step before, such as the leaving of what its
            update used last.
        """
        names = self._sums.keys() | late._sums.keys()
        return {name: self._sums.get(name, 0.0) + late._sums.get(name, 0.0) for name in names}
