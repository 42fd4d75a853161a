"""Reads `steps.jsonl` and `timeline.jsonl` of a run's folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from common.step.plan import StepMode
from rollplex.models import StepRecord

if TYPE_CHECKING:
    from pathlib import Path

STEPS = "steps.jsonl"
TIMELINE = "timeline.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When one piece of work ran.

    Attributes:
        group: None: about the whole step.
        task: "window" is the span in which sequences decoded.
        start_s: on the node's monotonic clock.
        sms: multiprocessors that it could fill; 0: all of the GPU, or there is none.
    """

    step: int
    epoch: int
    mode: StepMode
    group: int | None
    task: str
    participant: str
    start_s: float
    end_s: float
    sms: int = 0


def read_steps(run_dir: Path) -> list[StepRecord]:
    """Steps and evaluations that count, in order; of a step made twice, the later record."""
    newest: dict[tuple[StepMode, int], StepRecord] = {}
    for tree in _lines(run_dir / STEPS):
        step = StepRecord(
            step=tree["step"],
            epoch=tree["epoch"],
            mode=StepMode(tree["mode"]),
            weights_version=tree["weights_version"],
            wall=timedelta(seconds=tree["wall_s"]),
            metrics=tree["metrics"],
        )
        newest[step.mode, step.step] = step
    return sorted(newest.values(), key=lambda step: (step.weights_version, step.epoch))


def read_timeline(run_dir: Path) -> list[Span]:
    """All work of the committed epochs, by start."""
    spans = [
        Span(
            step=tree["step"],
            epoch=tree["epoch"],
            mode=StepMode(tree["mode"]),
            group=tree["group"],
            task=tree["task"],
            participant=tree["participant"],
            start_s=tree["start_ns"] / 1e9,
            end_s=tree["end_ns"] / 1e9,
            sms=tree.get("sms", 0),
        )
        for tree in _lines(run_dir / TIMELINE)
    ]
    return sorted(spans, key=lambda span: span.start_s)


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            # Half a line, left by a process that was killed while it wrote.
            continue
    return found
