"""What a worker is doing, for the progress display."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.ids import Epoch, GroupId, RunId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A snapshot; it may be old by the time it is read."""

    run_id: RunId
    """Empty: no run."""
    step: int
    epoch: Epoch
    phase: str
    """A task's name, `idle`, `configuring` or `unconfigured`."""
    group: GroupId | None
    events_seen: int
