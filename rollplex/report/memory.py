"""A node's memory over time by tensor class: sampled from the ledger, and drawn."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from matplotlib import colormaps

from rollplex.report.pictures import new_figure, save_figure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from rollplex.ledger import Ledger

EVERY_S = 0.05
_GIB = 1 << 30
_LEGEND_CLASSES = 24


@dataclass(slots=True, kw_only=True)
class MemorySeries:
    """Samples of one device, in order of time.

    Attributes:
        times_s: since the first one.
        totals: used and held, in bytes, as the ledger adds them up.
        classes: bytes of each class at each sample; they add up to `totals`.
        capacity_bytes: the budget.
    """

    device: str = ""
    times_s: list[float] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    classes: dict[str, list[int]] = field(default_factory=dict)
    capacity_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Largest of the totals; 0 without samples."""
        return max(self.totals, default=0)

    def add(self, time_s: float, ledger: Ledger) -> None:
        """One more sample, of the device that the workers compute on."""
        arena = ledger.arena()
        sizes = ledger.by_series()
        self.device, self.capacity_bytes = arena.device, arena.capacity_bytes
        for name in sizes.keys() - self.classes.keys():
            self.classes[name] = [0] * len(self.times_s)
        for name, values in self.classes.items():
            values.append(sizes.get(name, 0))
        self.times_s.append(time_s)
        self.totals.append(arena.total_bytes)


async def sample_memory(
    ask: Callable[[], Awaitable[Ledger]], *, seconds: float, every_s: float = EVERY_S
) -> MemorySeries:
    """Ask for the ledger again and again; at least twice.

    Args:
        ask: such as `Client.ledger`.
        seconds: how long.
    """
    series = MemorySeries()
    start_s = time.monotonic()
    due_s = start_s
    while len(series.times_s) < 2 or time.monotonic() < start_s + seconds:
        ledger = await ask()
        series.add(time.monotonic() - start_s, ledger)
        # A sample that came late keeps the next one in its place, and a slow broker is not rushed.
        due_s = max(due_s + every_s, time.monotonic())
        await asyncio.sleep(due_s - time.monotonic())
    return series


def draw_memory(series: MemorySeries, path: Path) -> None:
    """Stacked areas by tensor class, the largest lowest, under the line of the budget.

    Args:
        series: at least one sample.
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
    axes.set_title(f"memory of {series.device} by tensor class", fontsize=10)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=7)
    save_figure(figure, path)


def _label(series: MemorySeries, name: str, index: int) -> str:
    """For the legend, which leaves out what begins with an underscore."""
    hidden = "_" if index >= _LEGEND_CLASSES else ""
    return f"{hidden}{name}, {max(series.classes[name]) / _GIB:.2f} GiB"
