"""How many steps in a row had a gradient that was NaN or infinite, so that there was no update.

The number belongs to a version of the weights: a step that is run again counts once, and whoever
restores a version goes on from what is recorded with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.learner.errors import TooManyNonFinite

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.ids import WeightsVersion
    from common.registry.runs import DurableRecord
    from common.rl.optimizer import UpdateReport

NONFINITE = "nonfinite_in_a_row"
"""Its name among a step's metrics."""


def nonfinite_after(report: UpdateReport | None, before: int, *, limit: int) -> int:
    """The number with one more step.

    Args:
        report: of the step; None: no group had a gradient.
        limit: `algorithm.nonfinite_limit`.
    Raises: TooManyNonFinite if it has come to that.
    """
    if report is None or report.applied:
        return 0
    if before + 1 >= limit:
        raise TooManyNonFinite(
            f"the gradient was NaN or infinite in {limit} steps in a row "
            "(algorithm.nonfinite_limit)"
        )
    return before + 1


def recorded_nonfinite(records: Iterable[DurableRecord], version: WeightsVersion) -> int:
    """The number that belongs to a version; 0 where no durable copy of it has one."""
    of_version = [record.metrics for record in records if record.version == version]
    return int(max((metrics.get(NONFINITE, 0.0) for metrics in of_version), default=0.0))
