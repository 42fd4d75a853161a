"""When the phases of one training step began, from the run's files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollplex.report.pictures import WINDOW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollplex.models import StepRecord
    from rollplex.report.run_files import Span

PHASES = {
    "policy_vision": "vision",
    "reference_score": "scoring",
    "response_train": "training",
    "update": "update",
}
"""Phases by the task whose first start begins them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPhases:
    """One step, in seconds on the node's monotonic clock.

    Attributes:
        start_s, end_s: from the start of the attempt to the end of its last work.
        windows: spans in which sequences decoded.
        borders: when each phase began, in order.
    """

    step: int
    epoch: int
    start_s: float
    end_s: float
    windows: tuple[tuple[float, float], ...]
    borders: tuple[tuple[str, float], ...]


def step_phases(record: StepRecord, spans: Sequence[Span]) -> StepPhases | None:
    """The phases of a committed step; None: nothing is known of its work.

    Args:
        spans: of the run, by start; those of other epochs are left out.
    """
    mine = [span for span in spans if span.epoch == record.epoch]
    if not mine:
        return None
    end_s = max(span.end_s for span in mine)
    firsts: dict[str, float] = {}
    for span in mine:
        firsts.setdefault(span.task, span.start_s)
    return StepPhases(
        step=record.step,
        epoch=record.epoch,
        start_s=min(end_s - record.wall.total_seconds(), mine[0].start_s),
        end_s=end_s,
        windows=tuple((span.start_s, span.end_s) for span in mine if span.task == WINDOW),
        borders=tuple((PHASES[task], at_s) for task, at_s in firsts.items() if task in PHASES),
    )
