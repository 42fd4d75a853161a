"""What can be seen of a decode from outside, and the rates that two looks at it give.

A decode counts its iterations and says when the last one ended. An iteration that is under way at
a look counts by the time since then: jobs are only a few iterations long, so that whole iterations
would be too coarse.
"""

from __future__ import annotations

from dataclasses import dataclass

_NS_PER_S = 1e9
_STALLED_ITERATIONS = 4.0
"""So long after its last iteration a decode waits for something else than the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look; times are the node's monotonic clock."""

    at_ns: int
    rows: int
    """Sequences that decode."""
    admissions: int
    """Groups admitted so far."""
    iterations: int
    """Decode iterations that the rollout has counted so far."""
    ended_ns: int
    """When the last of them ended; 0: there was none."""
    burst: int = 1
    """Iterations that the rollout counts at once."""


def iteration_s(start: Reading, end: Reading) -> float | None:
    """Seconds of one iteration between the last ones before two looks; None: there was none."""
    done = end.iterations - start.iterations
    if done <= 0 or not start.ended_ns:
        return None
    return (end.ended_ns - start.ended_ns) / done / _NS_PER_S


def decode_rate(start: Reading, end: Reading, alone_s: float) -> float | None:
    """Rate of a decode between two looks over its rate alone.

    Args:
        alone_s: seconds of one iteration with nothing beside it.
    Returns: above 0, over 1 by noise only; None where it cannot be told: a group was admitted, the
        decode had been waiting, or there was not the time for one iteration.
    """
    alone_ns = alone_s * _NS_PER_S
    length_ns = end.at_ns - start.at_ns
    begun = (start.at_ns - start.ended_ns) / alone_ns
    if (
        start.admissions != end.admissions
        or begun > _STALLED_ITERATIONS * start.burst
        or length_ns < alone_ns
    ):
        return None
    done = end.iterations - start.iterations - min(begun, start.burst)
    # What is under way at the end has not ended, so the decode was no faster than this.
    rate = (done + end.burst) * alone_ns / length_ns
    counted_ns = end.ended_ns - start.at_ns
    if done > 0 and counted_ns > 0:
        rate = min(rate, done * alone_ns / counted_ns)
    return max(rate, 0.0) or None
