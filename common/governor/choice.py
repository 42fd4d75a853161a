"""Which share of the SMs the next job beside a decode gets.

Rates that were measured often enough count before the table's. Until then a share is tried, with
at most every other job, where the table does not put it too far behind the best one that is known.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from common.governor.measurements import ENOUGH
from common.governor.objective import best_share
from common.governor.rates import bracket_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.governor.measurements import Measurements
    from common.governor.rates import Rates
    from common.governor.table import CoRunTable
    from common.step.tasks import Task

FRACTIONS = (0.3, 0.55, 0.73, 0.85)
"""Of the GPU's SMs: the shares that are tried."""
GRANULE_SMS = 8
"""Shares are multiples of this, as the driver makes them."""
WITHIN_GAIN = 0.15
"""A share is tried if the table puts it at most so far behind the best known gain."""
MOST_TRIES = 4 * ENOUGH
"""Jobs of a kind on a share beside one bracket of rows after which it is not tried any more, even
if they gave no samples."""


def tried_shares(total_sms: int) -> tuple[int, ...]:
    """The shares of `FRACTIONS` on a GPU, without the whole of it, smallest first."""
    shares = {GRANULE_SMS * round(part * total_sms / GRANULE_SMS) for part in FRACTIONS}
    return tuple(sorted(share for share in shares if 0 < share < total_sms))


class ShareChooser:
    """Of one process."""

    def __init__(
        self,
        shares: Sequence[int],
        *,
        total_sms: int,
        table: CoRunTable,
        measured: Measurements | None,
    ) -> None:
        """Begin with nothing tried.

        Args:
            shares: that there are, at least one.
            measured: what comes to be known; None: the table says everything.
        """
        self._shares = tuple(shares)
        self._total_sms = total_sms
        self._table = table
        self._measured = measured
        self._jobs: Counter[tuple[Task, int, int]] = Counter()
        self._tried_last: dict[tuple[Task, int], bool] = {}

    def choose(self, task: Task, rows: int, window_price: float) -> int:
        """The share for a job that starts now, in SMs.

        Args:
            rows: sequences that decode, at least 1.
            window_price: see `common.governor.objective`.
        """
        bracket = bracket_of(rows)
        known = {share: self.rates(task, rows, share) for share in self._shares}
        share, tries = best_share(known, window_price), False
        if not self._tried_last.get((task, bracket)):
            untried = self._untried(task, rows, known)
            if untried:
                share, tries = best_share(untried, window_price), True
        self._tried_last[task, bracket] = tries
        self._jobs[task, bracket, share] += 1
        return share

    def rates(self, task: Task, rows: int, share: int) -> Rates:
        """As measured, or else as the table has it."""
        if self._measured is not None:
            measured = self._measured.rates(task, bracket_of(rows), share)
            if measured is not None:
                return measured
        return self._table.rates(task, rows, share, total_sms=self._total_sms)

    def _untried(self, task: Task, rows: int, known: dict[int, Rates]) -> dict[int, Rates]:
        if self._measured is None:
            return {}
        bracket, best_gain = bracket_of(rows), max(rates.gain for rates in known.values())
        return {
            share: rates
            for share, rates in known.items()
            if self._measured.samples(task, bracket, share) < ENOUGH
            and self._jobs[task, bracket, share] < MOST_TRIES
            and rates.gain >= best_gain - WITHIN_GAIN
        }
