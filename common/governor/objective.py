"""What the share of the SMs is chosen for.

With decode rate d and background rate p, each over its rate alone, one second beside each other
does d seconds of decode and p seconds of background work: it saves d + p - 1. Which shares save
most in the whole step depends on what there is less of, background work or window: a second of the
scarce one has its price, and a share is worth what it saves over what it spends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.step.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.governor.rates import Rates

WORK_LIMITED = 0.0
"""Price of the window where all of the work fits into it: each second of work has to save as much
as it can, (d + p - 1) / p."""
WINDOW_LIMITED = 1.0
"""Where more work than fits waits for its end: each second of decode has to save as much as it
can, (d + p - 1) / d."""
_AT_FIRST = 0.5
_MOST_CHANGE = 0.25
_SPARE = 0.03
"""Part of the window without work up to which the work counts as filling it."""

OF_WHOLE_GROUPS = frozenset({Task.REFERENCE_SCORE, Task.RESPONSE_TRAIN, Task.PREFIX_BACKWARD})
"""Work that comes with the first group that ends, late in the window: most of it is left at its
end."""


class WindowPrice:
    """The window's price for prefixes and vision, learned from how well they filled it."""

    def __init__(self) -> None:
        self._value = _AT_FIRST

    def of(self, task: Task) -> float:
        """For one kind of work, from WORK_LIMITED to WINDOW_LIMITED."""
        return WINDOW_LIMITED if task in OF_WHOLE_GROUPS else self._value

    def window_closed(self, spare: float) -> None:
        """Make larger shares dearer where work ran out early, and cheaper where it did not.

        Args: spare: part of the window that was left when the last job beside it had ended.
        """
        change = _MOST_CHANGE if spare <= _SPARE else -min(_MOST_CHANGE, spare)
        self._value = min(WINDOW_LIMITED, max(WORK_LIMITED, self._value + change))


def value_of(rates: Rates, window_price: float) -> float:
    """Saved seconds per second spent, the window's seconds at its price and those of work at the
    rest of 1.
    """
    spent = window_price * rates.decode + (1.0 - window_price) * rates.background
    return (rates.gain - 1.0) / spent


def best_share(known: Mapping[int, Rates], window_price: float) -> int:
    """The share that saves most; where none saves anything, the one of the greatest gain.

    Args:
        known: rates by share in SMs, at least one.
        window_price: from WORK_LIMITED to WINDOW_LIMITED.
    Returns: the smaller one of two that are equally good.
    """
    saving = {share: rates for share, rates in known.items() if rates.gain > 1.0}
    if saving:
        return max(saving, key=lambda share: (value_of(saving[share], window_price), -share))
    return max(known, key=lambda share: (known[share].gain, -share))
