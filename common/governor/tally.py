"""What one service did beside the decode of one step, for its log."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.governor.rates import Rates
    from common.step.tasks import Task


@dataclass(slots=True)
class _Kind:
    jobs: Counter[int] = field(default_factory=Counter)
    """By share."""
    seconds: float = 0.0
    samples: int = 0
    measured_s: float = 0.0
    """Of the jobs beside which the decode's rate is known."""
    decoded_s: float = 0.0
    """What the decode did meanwhile, as seconds of decode alone."""
    rates: dict[int, Rates] = field(default_factory=dict)
    """By share, as they are known after the last job there."""


class StepTally:
    """Jobs of one step."""

    def __init__(self) -> None:
        self._kinds: dict[Task, _Kind] = {}

    def add(
        self,
        task: Task,
        share: int,
        *,
        seconds: float,
        decode_rate: float | None,
        sampled: bool,
        rates: Rates,
    ) -> None:
        """One job has ended.

        Args:
            decode_rate: of the decode beside it, over its rate alone; None: not measured.
            sampled: whether it became a sample.
            rates: what is now known of that kind on that share.
        """
        kind = self._kinds.setdefault(task, _Kind())
        kind.jobs[share] += 1
        kind.seconds += seconds
        kind.samples += sampled
        kind.rates[share] = rates
        if decode_rate is not None:
            kind.measured_s += seconds
            kind.decoded_s += seconds * decode_rate

    def lines(self) -> dict[str, str]:
        """By task: shares with their jobs and gains, time, samples, and the decode's slow-down."""
        return {str(task): _line(kind) for task, kind in sorted(self._kinds.items())}


def _line(kind: _Kind) -> str:
    shares = ", ".join(
        f"{jobs} on {share} SMs (gain {kind.rates[share].gain:.2f})"
        for share, jobs in sorted(kind.jobs.items())
    )
    slowdown = f"{kind.measured_s / kind.decoded_s:.2f}" if kind.decoded_s > 0 else "unknown"
    return f"{shares}; {kind.seconds:.2f} s, {kind.samples} samples, decode slow-down {slowdown}"
