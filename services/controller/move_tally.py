"""What of the run's storages left the device in a step and came back, and how long that took."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from common.events import bodies

if TYPE_CHECKING:
    from common.events import Event


class MoveTally:
    """Of one epoch, folded from its events; each is to be told once."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)

    def apply(self, event: Event) -> None:
        """Fold one event in; most are about something else."""
        moved = event.body
        if not isinstance(moved, bodies.ContentsMoved):
            return
        name = moved.storage.replace(".", "_")
        done, doing = ("restored", "restore") if moved.restored else ("spilled", "spill")
        self._sums[f"{name}_{done}_bytes"] += moved.size_bytes
        self._sums[f"time_{name}_{doing}_s"] += moved.seconds

    def metrics(self) -> dict[str, float]:
        """By storage, such as `reference_weights_restored_bytes`; nothing for what did not move."""
        return dict(self._sums)
