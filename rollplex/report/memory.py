"""A node's memory over time by tensor class: sampled from the ledger, and drawn."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from matplotlib import colormaps

from rollplex.report.pictures import new_figure, save_figure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from rollplex.ledger import Ledger
    from rollplex.report.step_phases import StepPhases

EVERY_S = 0.05
_GIB = 1 << 30
_LEGEND_CLASSES = 24


@dataclass(slots=True, kw_only=True)
class MemorySeries:
    """Samples of one device, in order of time.

    Attributes:
        start_s: when the first one was, or the part that was cut out began, on the node's monotonic
            clock.
        times_s: since then.
        totals: used and held, in bytes, as the ledger adds them up.
        classes: bytes of each class at each sample; they add up to `totals`.
        capacity_bytes: the budget.
    """

    device: str = ""
    start_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    classes: dict[str, list[int]] = field(default_factory=dict)
    capacity_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Largest of the totals; 0 without samples."""
        return max(self.totals, default=0)

    def add(self, now_s: float, ledger: Ledger) -> None:
        """One more sample, of the device that the workers compute on.

        Args: now_s: on the node's monotonic clock.
        """
        if not self.times_s:
            self.start_s = now_s
        arena = ledger.arena()
        sizes = ledger.by_series()
        self.device, self.capacity_bytes = arena.device, arena.capacity_bytes
        for name in sizes.keys() - self.classes.keys():
            self.classes[name] = [0] * len(self.times_s)
        for name, values in self.classes.items():
            values.append(sizes.get(name, 0))
        self.times_s.append(now_s - self.start_s)
        self.totals.append(arena.total_bytes)

    def between(self, start_s: float, end_s: float) -> MemorySeries:
        """The part from one time to another, with a value at each of the two: that of the sample
        before it.

        Args:
            start_s: on the node's monotonic clock; not before the first sample.
            end_s: after `start_s`.
        """
        first = bisect_right(self.times_s, start_s - self.start_s) - 1
        if first < 0:
            raise ValueError(f"{start_s} is before the first sample, {self.start_s}")
        last = bisect_right(self.times_s, end_s - self.start_s) - 1
        inside = [self.start_s + time_s - start_s for time_s in self.times_s[first + 1 : last + 1]]

        def part(values: list[int]) -> list[int]:
            return [*values[first : last + 1], values[last]]

        classes = {name: part(values) for name, values in self.classes.items()}
        return MemorySeries(
            device=self.device,
            start_s=start_s,
            times_s=[0.0, *inside, end_s - start_s],
            totals=part(self.totals),
            classes={name: values for name, values in classes.items() if any(values)},
            capacity_bytes=self.capacity_bytes,
        )


async def sample_memory(
    ask: Callable[[], Awaitable[Ledger]], *, seconds: float, every_s: float = EVERY_S
) -> MemorySeries:
    """Ask for the ledger again and again; at least twice.

    Args:
        ask: such as `Client.ledger`.
        seconds: how long.
    """
    series = MemorySeries()
    until_s = time.monotonic() + seconds
    await _sample(
        series, ask, lambda: len(series.times_s) < 2 or time.monotonic() < until_s, every_s
    )
    return series


@asynccontextmanager
async def sampled_memory(
    ask: Callable[[], Awaitable[Ledger]], *, every_s: float = EVERY_S
) -> AsyncIterator[MemorySeries]:
    """Ask for the ledger again and again until the block ends; yields the series as it grows.

    Raises: what `ask` raised, when the block ends.
    """
    series = MemorySeries()
    sampling = asyncio.create_task(_sample(series, ask, lambda: True, every_s))
    try:
        yield series
    finally:
        sampling.cancel()
        await asyncio.wait({sampling})
        if not sampling.cancelled() and (error := sampling.exception()) is not None:
            raise error


async def _sample(
    series: MemorySeries,
    ask: Callable[[], Awaitable[Ledger]],
    more: Callable[[], bool],
    every_s: float,
) -> None:
    due_s = time.monotonic()
    while more():
        ledger = await ask()
        series.add(time.monotonic(), ledger)
        # A sample that came late keeps the next one in its place, and a slow broker is not rushed.
        due_s = max(due_s + every_s, time.monotonic())
        await asyncio.sleep(due_s - time.monotonic())


def draw_memory(series: MemorySeries, path: Path, *, step: StepPhases | None = None) -> None:
    """Stacked areas by tensor class, the largest lowest, under the line of the budget.

    Args:
        series: at least one sample.
        step: that the samples are of: its phases are marked, its decode window is shaded.
    """
    names = sorted(series.classes, key=lambda name: -max(series.classes[name]))
    figure, axes = new_figure(11.0, 5.0)
    heights = [[value / _GIB for value in series.classes[name]] for name in names]
    if names:
        axes.stackplot(
            series.times_s,
            *heights,
            labels=[_label(series, name, index) for index, name in enumerate(names)],
            colors=[colormaps["tab20"](index % 20) for index in range(len(names))],
            step="post",
        )
    axes.plot(
        series.times_s,
        [total / _GIB for total in series.totals],
        color="black",
        linewidth=0.8,
        drawstyle="steps-post",
        label=f"all, {series.peak_bytes / _GIB:.2f} GiB at most",
    )
    if series.peak_bytes > series.capacity_bytes / 2:
        axes.axhline(series.capacity_bytes / _GIB, color="#e15759", linestyle="--", label="budget")
    axes.set_xlim(series.times_s[0], max(series.times_s[-1], 1e-3))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("GiB")
    title = f"memory of {series.device} by tensor class"
    if step is not None:
        _mark_phases(axes, step)
        title = f"{title}: step {step.step}, epoch {step.epoch}; decode window shaded"
    axes.set_title(title, fontsize=10)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=7)
    save_figure(figure, path)


def _mark_phases(axes: Any, step: StepPhases) -> None:
    """Over the areas, which cover what is behind them."""
    for opened_s, closed_s in step.windows:
        axes.axvspan(
            opened_s - step.start_s, closed_s - step.start_s, color="black", alpha=0.12, zorder=3
        )
    for name, at_s in step.borders:
        axes.axvline(at_s - step.start_s, color="black", linestyle=":", linewidth=0.8, zorder=4)
        axes.annotate(
            name,
            (at_s - step.start_s, 1.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(2, -2),
            textcoords="offset points",
            rotation=90,
            va="top",
            fontsize=7,
            zorder=5,
        )


def _label(series: MemorySeries, name: str, index: int) -> str:
    """For the legend, which leaves out what begins with an underscore."""
    hidden = "_" if index >= _LEGEND_CLASSES else ""
    return f"{hidden}{name}, {max(series.classes[name]) / _GIB:.2f} GiB"
