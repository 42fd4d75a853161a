"""What the share of the SMs is chosen for.

With decode rate d and background rate p, each over its rate alone, one second beside each other
does d seconds of decode and p seconds of background work: it saves d + p - 1. Which shares save
most in the whole step depends on what there is less of, background work or window.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from common.step.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.governor.rates import Rates


class Objective(StrEnum):
    """Which saving is to be the greatest."""

    WORK_LIMITED = "work_limited"
    """Less background work than window: all of the work fits, so each second of work has to save
    as much as it can, (d + p - 1) / p."""
    WINDOW_LIMITED = "window_limited"
    """More background work than window: what does not fit waits for its end, so each second of
    decode has to save as much as it can, (d + p - 1) / d."""

    def value_of(self, rates: Rates) -> float:
        """Saved seconds per second of what there is less of."""
        scarce = rates.background if self is Objective.WORK_LIMITED else rates.decode
        return (rates.gain - 1.0) / scarce


_OF_WHOLE_GROUPS = frozenset({Task.REFERENCE_SCORE, Task.RESPONSE_TRAIN, Task.PREFIX_BACKWARD})


def objective_of(task: Task) -> Objective:
    """What a kind of work is short of.

    Prefixes and vision are there from the window's beginning, and are few. Scoring and training
    come with the first group that ends, late in the window, and most of them are left at its end.
    """
    return Objective.WINDOW_LIMITED if task in _OF_WHOLE_GROUPS else Objective.WORK_LIMITED


def best_share(known: Mapping[int, Rates], objective: Objective) -> int:
    """The share that saves most; where none saves anything, the one of the greatest gain.

    Args:
        known: rates by share in SMs, at least one.
    Returns: the smaller one of two that are equally good.
    """
    saving = {share: rates for share, rates in known.items() if rates.gain > 1.0}
    if saving:
        return max(saving, key=lambda share: (objective.value_of(saving[share]), -share))
    return max(known, key=lambda share: (known[share].gain, -share))
