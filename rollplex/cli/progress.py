"""Progress of a run: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, Self

from common.step.plan import StepMode
from rollplex.cli.tables import number

if TYPE_CHECKING:
    from rich.console import Group

    from rollplex.models import Run, RunState, RunUpdate, StepRecord

_RECENT_STEPS = 20
_NOTES = 4


class Progress(Protocol):
    """Shows updates while it is open."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, update: RunUpdate) -> None:
        """One more update."""


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def show(self, update: RunUpdate) -> None:
        """Leave it out."""


class Pace:
    """How fast steps come, for the time left."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=_RECENT_STEPS)

    def note(self, steps_done: int) -> None:
        """The run has come this far now."""
        if not self._seen or self._seen[-1][1] != steps_done:
            self._seen.append((time.monotonic(), steps_done))

    def left(self, run: Run) -> timedelta | None:
        """Time to the last step at the recent pace; None: not known yet."""
        if len(self._seen) < 2:
            return None
        (began_s, first), (ended_s, last) = self._seen[0], self._seen[-1]
        if last <= first:
            return None
        per_step_s = (ended_s - began_s) / (last - first)
        return timedelta(seconds=round(per_step_s * (run.steps_total - run.steps_done)))


class Lines:
    """One line a step, note or change of state."""

    def __init__(self) -> None:
        self._state: tuple[RunState, str] | None = None
        self._pace = Pace()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def show(self, update: RunUpdate) -> None:
        """Print what is new."""
        run = update.run
        self._pace.note(run.steps_done)
        if update.step is not None:
            _line(step_text(update.step, run))
        if (run.state, run.reason) != self._state:
            self._state = (run.state, run.reason)
            _line(f"{run.state}" + (f": {run.reason}" if run.reason else ""))
        if update.note:
            _line(f"note: {update.note}")


class Live:
    """A display that is drawn again and again."""

    def __init__(self, run: Run) -> None:
        from rich.live import Live as RichLive

        self._pace = Pace()
        self._step: StepRecord | None = None
        self._notes: deque[str] = deque(maxlen=_NOTES)
        self._live = RichLive(refresh_per_second=8)
        self._run = run

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)

    def show(self, update: RunUpdate) -> None:
        """Draw it."""
        self._pace.note(update.run.steps_done)
        self._step = update.step or self._step
        if update.note:
            self._notes.append(update.note)
        self._live.update(self._draw(update))

    def _draw(self, update: RunUpdate) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        run = update.run
        left = self._pace.left(run)
        head = Text(f"{run.run_id}  {run.state}")
        if run.reason:
            head.append(f"  {run.reason}")
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            f"step {run.steps_done}/{run.steps_total}",
            ProgressBar(total=run.steps_total, completed=run.steps_done, width=40),
            f"left {left}" if left is not None else "",
            f"restarts {run.restarts}" if run.restarts else "",
        )
        phases = Table.grid(padding=(0, 2))
        for seen in update.phases:
            at = "" if seen.group is None else f"group {seen.group}"
            phases.add_row(seen.participant, seen.phase if seen.serving else "away", at)
        last = Text(step_text(self._step, run) if self._step else "")
        notes = [Text(f"note: {note}") for note in self._notes]
        return Group(head, bar, last, phases, *notes)


def open_progress(run: Run, *, live: bool) -> Progress:
    """Args: live: whether the output is a terminal."""
    return Live(run) if live else Lines()


def step_text(step: StepRecord, run: Run) -> str:
    """One committed step in a line."""
    metrics = step.metrics
    if step.mode is StepMode.EVAL:
        reward = number(metrics.get("reward_mean"))
        return f"evaluation of version {step.weights_version}: held-out reward {reward}"
    parts = [
        f"step {step.weights_version}/{run.steps_total}",
        f"reward {number(metrics.get('reward_mean'))}",
        f"tokens/s {number(metrics.get('tokens_per_s'))}",
        f"{step.wall.total_seconds():.2f} s",
    ]
    if "prefix_overlap_fraction" in metrics:
        parts.append(f"overlap {metrics['prefix_overlap_fraction']:.0%}")
    return "  ".join(parts)


def _line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
