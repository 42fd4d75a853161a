"""The files of a run's folder that the controller writes.

`recipe.json`: the resolved recipe. `steps.jsonl`: one `StepRecord` a line; where a step has
several, the last one counts. `timeline.jsonl`: one `SpanRecord` a line, committed epochs only.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from common.errors import InvalidArgument
from services.controller.record import StepRecord

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from services.controller.record import SpanRecord

RECIPE = "recipe.json"
STEPS = "steps.jsonl"
TIMELINE = "timeline.jsonl"


def check_run_dir(run_dir: Path) -> None:
    """Raises InvalidArgument if the folder holds another run."""
    if (run_dir / RECIPE).exists() or (run_dir / STEPS).exists():
        raise InvalidArgument(
            f"run_dir = {str(run_dir)!r} holds another run; name a folder that is new or empty"
        )


def prepare_run_dir(run_dir: Path, recipe_json: str) -> None:
    """Make the folder and write the recipe.

    Raises:
        InvalidArgument: it cannot be made or written, or holds another run.
    """
    check_run_dir(run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / RECIPE).write_text(recipe_json + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(
            f"run_dir = {str(run_dir)!r} cannot be used: {error}; name a folder that the "
            "controller may write to"
        ) from error


def append_step(run_dir: Path, step: StepRecord, spans: Iterable[SpanRecord]) -> None:
    """Add a step and its timeline."""
    _append(run_dir / STEPS, [json.dumps(step.to_json())])
    _append(run_dir / TIMELINE, [json.dumps(span.to_json()) for span in spans])


def read_steps(run_dir: Path) -> list[StepRecord]:
    """Every whole line of `steps.jsonl`, in the order in which it was written."""
    try:
        lines = (run_dir / STEPS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(StepRecord.from_json(json.loads(line)))
        except ValueError:
            # A process killed while it wrote leaves half a line, which counts for nothing.
            continue
    return found


def _append(path: Path, lines: list[str]) -> None:
    if not lines:
        return
    with path.open("ab+") as file:
        # A process killed while it wrote leaves half a line: end it, so that ours stay whole.
        if file.seek(0, 2) > 0:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(("\n".join(lines) + "\n").encode())
