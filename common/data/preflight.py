"""Checks a run's model folder and data before the run starts.

``python -m common.data.preflight --recipe recipe.json`` prints one JSON object on standard output:
``{"ok": ..., "errors": [{"key", "value", "message"}], "warnings": [...], "rows": {"train": N}}``.
It runs the recipe's own code, so a service calls it as a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config.loading import load_config
from common.config.recipe import Recipe
from common.data.errors import SampleError
from common.data.workers import SampleReader, SampleSource
from common.errors import RollplexError
from common.vlm.files import check_model_files

if TYPE_CHECKING:
    from collections.abc import Sequence

PROBED_ROWS = 4
"""Rows of each split that are prepared; the run is refused only if all of them fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something wrong with a recipe's value."""

    key: str
    value: Any
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightReport:
    """What was found.

    Attributes:
        errors: each of them keeps the run from starting.
        warnings: single rows that would be dropped.
        rows: number of rows of each split that could be opened.
    """

    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    rows: dict[str, int]

    @property
    def ok(self) -> bool:
        """Whether the run may start."""
        return not self.errors

    def to_json(self) -> str:
        """One line; values that are not JSON appear as their text."""
        return json.dumps({"ok": self.ok, **asdict(self)}, default=str)


def check(recipe: Recipe) -> PreflightReport:
    """Load the processor, open every split and prepare its first rows, in this process."""
    model_path = str(recipe.model.path)
    source = SampleSource.from_config(model_path, recipe.data)
    try:
        check_model_files(model_path, weights=recipe.model.weights == "files")
        reader = SampleReader(source)
    except RollplexError as error:
        problem = Problem(key="model.path", value=model_path, message=str(error))
        return PreflightReport(errors=(problem,), warnings=(), rows={})
    errors: list[Problem] = []
    warnings: list[Problem] = []
    rows: dict[str, int] = {}
    for split, value in source.splits.items():
        key = f"data.{split}"
        try:
            rows[split] = len(reader.dataset(split))
        except RollplexError as error:
            errors.append(Problem(key=key, value=value, message=str(error)))
            continue
        probed = min(PROBED_ROWS, rows[split])
        failed = [
            Problem(key=key, value=value, message=message)
            for index in range(probed)
            if (message := _failure(reader, split, index)) is not None
        ]
        (errors if len(failed) == probed else warnings).extend(failed)
    return PreflightReport(errors=tuple(errors), warnings=tuple(warnings), rows=rows)


def _failure(reader: SampleReader, split: str, index: int) -> str | None:
    try:
        reader.prepare(split, index)
    except SampleError as error:
        return str(error)
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report. Returns: 0 if the run may start, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m common.data.preflight", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True, help="resolved recipe, JSON or TOML")
    options = parser.parse_args(arguments)
    with contextlib.redirect_stdout(sys.stderr):  # the recipe's own code may print
        try:
            report = check(load_config(Recipe, options.recipe))
        except RollplexError as error:
            problem = Problem(key="recipe", value=str(options.recipe), message=str(error))
            report = PreflightReport(errors=(problem,), warnings=(), rows={})
    sys.stdout.write(report.to_json() + "\n")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
