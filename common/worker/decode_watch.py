"""How fast a decode is with nothing beside it, found by watching it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from common.governor.rates import bracket_of
from common.governor.reading import iteration_s

if TYPE_CHECKING:
    from common.governor.reading import Reading
    from common.worker.live_decode import LiveDecode

ITERATIONS = 8
"""Iterations that are watched."""
SHORT_S = 0.06
"""After so long fewer are enough,"""
LEAST_ITERATIONS = 2
"""but not fewer than this,"""
LIMIT_S = 0.25
"""unless it takes longer than this."""
_POLL_S = 0.001


def watched_iteration_s(live: LiveDecode) -> float | None:
    """Block until a decode has gone on for a few iterations.

    Returns: seconds of one; None where it ended, changed, or was too slow meanwhile.
    """
    start = live.reading()
    begun_s = time.monotonic()
    first: Reading | None = None
    while True:
        now, passed_s = live.reading(), time.monotonic() - begun_s
        if not same_batch(start, now):
            return None
        if first is None and now.iterations > start.iterations:
            # Part of the iteration that ends here may have had another job beside it.
            first = now
        done = 0 if first is None else now.iterations - first.iterations
        enough = LEAST_ITERATIONS if passed_s > SHORT_S else ITERATIONS
        if first is not None and done >= enough:
            return iteration_s(first, now)
        if passed_s > LIMIT_S:
            return None
        time.sleep(_POLL_S)


def same_batch(one: Reading, other: Reading) -> bool:
    """Whether as many sequences decode, as far as brackets tell, and none came in."""
    return (
        one.rows > 0
        and other.rows > 0
        and bracket_of(one.rows) == bracket_of(other.rows)
        and one.admissions == other.admissions
    )
