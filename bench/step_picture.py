"""One step of every schedule, a lane a service, with GPU memory and SM shares below it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rollplex.report.pictures import COLOURS, OTHER_COLOUR

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bench.step_memory import MemoryTrace
    from rollplex.report.run_files import Span

_LANES = ("prefix-encoder/0", "rollout/0", "reference/0", "learner/0")
_LANE_HEIGHT = 0.8
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturedStep:
    """One schedule's typical step."""

    label: str
    step_s: float
    spans: Sequence[Span]


def draw_steps(
    steps: Sequence[PicturedStep], memory: MemoryTrace, path: Path, *, title: str
) -> None:
    """Write the picture.

    Args:
        steps: at least one, each with at least one span.
        memory: of the whole measurement; the part of each step is shown below it.
    """
    heights = [part for _ in steps for part in (2.0, 1.0)]
    figure = Figure(figsize=(12.0, 2.8 * len(steps) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
    seen: set[str] = set()
    for index, step in enumerate(steps):
        origin_s = min(span.start_s for span in step.spans)
        lanes, below = axes[2 * index][0], axes[2 * index + 1][0]
        _draw_lanes(lanes, step, origin_s, seen)
        _draw_memory(below, memory, origin_s, max(span.end_s for span in step.spans))
        _draw_shares(below.twinx(), step, origin_s)
    axes[-1][0].set_xlabel("seconds")
    figure.suptitle(title, fontsize=10)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def _draw_lanes(axes: Any, step: PicturedStep, origin_s: float, seen: set[str]) -> None:
    for span in step.spans:
        start_s, length_s = span.start_s - origin_s, span.end_s - span.start_s
        if span.task == "window":
            axes.axvspan(start_s, start_s + length_s, color="#fff2cc", zorder=0)
            continue
        axes.broken_barh(
            [(start_s, length_s)],
            (_LANES.index(span.participant) - _LANE_HEIGHT / 2, _LANE_HEIGHT),
            facecolors=COLOURS.get(span.task, OTHER_COLOUR),
            edgecolor="white",
            linewidth=0.3,
            alpha=0.3 if span.task == "decode" else 1.0,
            label=None if span.task in seen else span.task.replace("_", " "),
        )
        seen.add(span.task)
    axes.set_yticks(range(len(_LANES)), _LANES)
    axes.set_ylim(len(_LANES) - 0.5, -0.5)
    axes.set_title(f"{step.label}: {step.step_s:.2f} s (decode window shaded)", fontsize=9)


def _draw_shares(axes: Any, step: PicturedStep, origin_s: float) -> None:
    """SMs of the work that was kept to a share; nothing where there was none."""
    shared = [span for span in step.spans if span.sms]
    for span in shared:
        axes.broken_barh(
            [(span.start_s - origin_s, span.end_s - span.start_s)],
            (0, span.sms),
            facecolors=COLOURS.get(span.task, OTHER_COLOUR),
            alpha=0.4,
        )
    axes.set_ylim(0, 1.1 * max((span.sms for span in shared), default=1))
    axes.set_ylabel("SMs", fontsize=8)
    if not shared:
        axes.set_yticks([])


def _draw_memory(axes: Any, memory: MemoryTrace, origin_s: float, end_s: float) -> None:
    for name, values in (("GPU", memory.device_bytes), ("ledger", memory.ledger_bytes)):
        points = [
            (time_s - origin_s, value / _GIB)
            for time_s, value in zip(memory.times_s, values, strict=False)
            if origin_s <= time_s <= end_s
        ]
        if points:
            axes.plot(*zip(*points, strict=True), label=f"_{name}")
            axes.annotate(name, points[-1], fontsize=7)
    axes.set_ylabel("GiB", fontsize=8)
    axes.set_ylim(bottom=0)
