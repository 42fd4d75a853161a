"""The figures of a finished run."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.step.plan import StepMode
from rollplex.report.run_files import read_steps, read_timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollplex.models import Run, StepRecord

SUMMARY = "summary.json"
LEARNING_CURVE = "learning_curve.png"
TIMELINE_PICTURE = "timeline.png"


def summarise(run: Run) -> dict[str, Any]:
    """The result as JSON values; what cannot be known is None."""
    steps = [step for step in read_steps(Path(run.run_dir)) if step.mode is StepMode.TRAIN]
    # A step whose record was lost with the controller has no time of its own.
    times_s = [step.wall.total_seconds() for step in steps if step.wall]
    end = run.ended or run.created
    return {
        "run_id": run.run_id,
        "state": run.state.value,
        "reason": run.reason,
        "schedule": json.loads(run.recipe_json)["training"]["schedule"],
        "steps": run.steps_done,
        "steps_total": run.steps_total,
        "wall_s": (end - run.created).total_seconds(),
        "eval_reward_before": run.eval_reward_before,
        "eval_reward_after": run.eval_reward_after,
        "rewards": [step.metrics.get("reward_mean") for step in steps],
        "step_times_s": times_s,
        "step_time_median_s": statistics.median(times_s) if times_s else None,
        "tokens_per_s": _mean(steps, "tokens_per_s"),
        "prefix_overlap_fraction": _mean(steps, "prefix_overlap_fraction"),
        "hidden_fraction": _mean(steps, "hidden_fraction"),
        "update_order_margin_s": min(_values(steps, "update_order_margin_s"), default=None),
        "restarts": run.restarts,
        "samples_dropped": run.samples_dropped,
        "run_dir": run.run_dir,
    }


def write_report(run: Run, summary: dict[str, Any]) -> list[Path]:
    """Write summary and pictures into the run's folder.

    Returns: what was written; nothing where the folder is on another machine.
    """
    from rollplex.report.pictures import draw_learning_curve, draw_timeline

    folder = Path(run.run_dir)
    if not folder.is_dir():
        return []
    written = [folder / SUMMARY]
    written[0].write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    steps = read_steps(folder)
    if steps:
        draw_learning_curve(steps, folder / LEARNING_CURVE)
        written.append(folder / LEARNING_CURVE)
    typical = _typical_step(steps)
    spans = [s for s in read_timeline(folder) if typical is not None and s.epoch == typical.epoch]
    if typical is not None and spans:
        draw_timeline(spans, typical, folder / TIMELINE_PICTURE)
        written.append(folder / TIMELINE_PICTURE)
    return written


def _typical_step(steps: Sequence[StepRecord]) -> StepRecord | None:
    """The training step of median length; None: there is none."""
    trained = sorted(
        (s for s in steps if s.mode is StepMode.TRAIN and s.wall.total_seconds() > 0),
        key=lambda step: step.wall,
    )
    return trained[len(trained) // 2] if trained else None


def _values(steps: Sequence[StepRecord], name: str) -> list[float]:
    return [step.metrics[name] for step in steps if name in step.metrics]


def _mean(steps: Sequence[StepRecord], name: str) -> float | None:
    values = _values(steps, name)
    return statistics.fmean(values) if values else None
