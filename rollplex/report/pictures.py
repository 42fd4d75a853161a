"""Draws a run: rewards over the steps, and one step in time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from common.step.plan import StepMode

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rollplex.models import StepRecord
    from rollplex.report.run_files import Span

WINDOW = "window"

COLOURS = {
    "prepare": "#bab0ac",
    "policy_vision": "#76b7b2",
    "policy_prefix": "#4e79a7",
    "reference_prefix": "#59a14f",
    "admit": "#ffbe7d",
    "decode": "#f28e2b",
    "reward": "#edc948",
    "reference_score": "#8cd17d",
    "response_train": "#e15759",
    "prefix_backward": "#b07aa1",
    "update": "#9c755f",
    "ahead_prepare": "#d7cfcd",
    "ahead_vision": "#b3d8d5",
    "ahead_reference": "#a5d19f",
}
"""By task, as in `timeline.jsonl`."""
OTHER_COLOUR = "#d3d3d3"
_SMOOTHING = 10
_LANE_HEIGHT = 0.8


def draw_learning_curve(steps: Sequence[StepRecord], path: Path) -> None:
    """Mean reward of each step, its running mean, and the evaluations."""
    trained = [s for s in steps if s.mode is StepMode.TRAIN and "reward_mean" in s.metrics]
    evaluated = [s for s in steps if s.mode is StepMode.EVAL and "reward_mean" in s.metrics]
    figure, axes = new_figure(7.0, 4.0)
    versions = [step.weights_version for step in trained]
    rewards = [step.metrics["reward_mean"] for step in trained]
    axes.plot(versions, rewards, color="#a0cbe8", linewidth=1, label="training, each step")
    axes.plot(
        versions, _running_mean(rewards), color="#4e79a7", label=f"mean of the last {_SMOOTHING}"
    )
    if evaluated:
        axes.plot(
            [step.weights_version for step in evaluated],
            [step.metrics["reward_mean"] for step in evaluated],
            "o--",
            color="#e15759",
            label="held out, greedy",
        )
    axes.set_xlabel("updates")
    axes.set_ylabel("mean reward")
    axes.legend(loc="best", frameon=False)
    save_figure(figure, path)


def draw_timeline(spans: Sequence[Span], step: StepRecord, path: Path) -> None:
    """One step: a lane a service, a colour a task, the decode window shaded.

    Args:
        spans: the work of one epoch, at least one span.
    """
    lanes = sorted({span.participant for span in spans if span.task != WINDOW})
    origin_s = min(span.start_s for span in spans)
    figure, axes = new_figure(10.0, 1.4 + 0.6 * len(lanes))
    for span in spans:
        if span.task == WINDOW:
            axes.axvspan(span.start_s - origin_s, span.end_s - origin_s, color="#fff2cc", zorder=0)
    seen: set[str] = set()
    for span in spans:
        if span.task == WINDOW:
            continue
        axes.broken_barh(
            [(span.start_s - origin_s, span.end_s - span.start_s)],
            (lanes.index(span.participant) - _LANE_HEIGHT / 2, _LANE_HEIGHT),
            facecolors=COLOURS.get(span.task, OTHER_COLOUR),
            edgecolor="white",
            linewidth=0.4,
            alpha=0.5 if span.task == "decode" else 1.0,
            label=None if span.task in seen else span.task.replace("_", " "),
        )
        seen.add(span.task)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(f"step {step.step}, epoch {step.epoch}; decode window shaded", fontsize=10)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8)
    save_figure(figure, path)


def new_figure(width: float, height: float) -> tuple[Figure, Any]:
    """A figure with one pair of axes, in inches; it needs no display."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def save_figure(figure: Figure, path: Path) -> None:
    """Write it, in the format that the file's ending names."""
    figure.savefig(path, dpi=150)


def _running_mean(values: Sequence[float]) -> list[float]:
    means = []
    for index in range(len(values)):
        recent = values[max(0, index + 1 - _SMOOTHING) : index + 1]
        means.append(sum(recent) / len(recent))
    return means
