"""Step time over the memory budget, a line a schedule; what does not fit is marked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from matplotlib import colormaps

from bench.budgeted_node import Outcome
from rollplex.report.pictures import new_figure, save_figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_MARK_AT = 0.04
"""Height of the marks of what does not fit, in parts of the picture; one schedule above another."""


@dataclass(slots=True, kw_only=True)
class Curve:
    """One schedule, by falling budget.

    Attributes:
        budgets_gib, step_s, low_s, high_s: of each budget that it fits in: median, fastest and
            slowest step.
        too_small_gib: budgets that it does not fit in.
    """

    schedule: str
    budgets_gib: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    low_s: list[float] = field(default_factory=list)
    high_s: list[float] = field(default_factory=list)
    too_small_gib: list[float] = field(default_factory=list)


def curves(points: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """By schedule, in their first order; a run that failed for another reason is left out."""
    found: dict[str, Curve] = {}
    for point in sorted(points, key=lambda point: -point["budget_gib"]):
        curve = found.setdefault(point["schedule"], Curve(schedule=point["schedule"]))
        if point["outcome"] == Outcome.FITS:
            curve.budgets_gib.append(point["budget_gib"])
            curve.step_s.append(point["step_s"])
            curve.low_s.append(point["step_min_s"])
            curve.high_s.append(point["step_max_s"])
        elif point["outcome"] == Outcome.TOO_LARGE:
            curve.too_small_gib.append(point["budget_gib"])
    return list(found.values())


def draw_curves(drawn: Sequence[Curve], path: Path, *, title: str) -> None:
    """Write the picture, the largest budget on the left."""
    figure, axes = new_figure(8.0, 4.5)
    for index, curve in enumerate(drawn):
        colour = colormaps["tab10"](index)
        axes.plot(curve.budgets_gib, curve.step_s, "o-", color=colour, label=curve.schedule)
        axes.fill_between(curve.budgets_gib, curve.low_s, curve.high_s, color=colour, alpha=0.2)
        axes.plot(
            curve.too_small_gib,
            [_MARK_AT * (index + 1)] * len(curve.too_small_gib),
            "x",
            color=colour,
            transform=axes.get_xaxis_transform(),
            label=f"{curve.schedule}: does not fit" if curve.too_small_gib else None,
        )
    axes.set_ylim(bottom=0)
    axes.invert_xaxis()
    axes.set_xlabel("memory budget, GiB")
    axes.set_ylabel("seconds a step, median and range")
    axes.set_title(title, fontsize=10)
    axes.legend(loc="best", frameon=False, fontsize=8)
    save_figure(figure, path)
