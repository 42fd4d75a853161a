"""What is checked before a run is accepted. Users' code runs in processes of its own only."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.errors import DeadlineExceeded, InvalidArgument, RollplexError

if TYPE_CHECKING:
    from pathlib import Path

    from common.config.recipe import Recipe

DATA_CHECK = "common.data.preflight"
REWARD_CHECK = "services.rollout.rewards.check"

_TEXT_LIMIT = 2000


class PreflightBroken(RollplexError):
    """A check could not be carried out; nothing is known about the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """What is known of the data.

    Attributes:
        eval_rows: 0: there is no held-out set.
        warnings: rows that will be dropped.
    """

    train_rows: int
    eval_rows: int
    warnings: tuple[str, ...] = ()


async def check_recipe(recipe: Recipe, recipe_file: Path, *, deadline_s: float) -> DataFacts:
    """Check data, model files and rewards.

    Args:
        recipe_file: the resolved recipe, as JSON.

    Raises:
        InvalidArgument: with one line for each problem: key, value, what is wrong.
        DeadlineExceeded: a check took too long.
        PreflightBroken: a check itself failed.
    """
    reports = await asyncio.gather(
        *(_run(module, recipe_file, deadline_s) for module in (DATA_CHECK, REWARD_CHECK))
    )
    problems = [problem for report in reports for problem in report["errors"]]
    if problems:
        lines = "\n".join(f"  {_line(problem)}" for problem in problems)
        raise InvalidArgument(
            f"recipe {recipe.name} cannot run:\n{lines}",
            keys=[str(problem.get("key", "")) for problem in problems],
        )
    rows = reports[0]["rows"]
    return DataFacts(
        train_rows=int(rows["train"]),
        eval_rows=int(rows.get("eval") or 0),
        warnings=tuple(_line(warning) for warning in reports[0].get("warnings", ())),
    )


async def _run(module: str, recipe_file: Path, deadline_s: float) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        "--recipe",
        str(recipe_file),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(deadline_s):
            out, err = await process.communicate()
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"{module} took over {deadline_s:g} s; does loading the data or importing the reward "
            "functions hang?"
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        report = json.loads(out.decode().strip().splitlines()[-1])
        if report["ok"] or report["errors"]:
            return dict(report)
    except (ValueError, LookupError, TypeError, UnicodeDecodeError):
        pass
    text = err.decode(errors="replace").strip()[-_TEXT_LIMIT:]
    raise PreflightBroken(
        f"python -m {module} ended with status {process.returncode} and no report: {text}"
    )


def _line(problem: dict[str, Any]) -> str:
    message = str(problem.get("message", ""))
    key = str(problem.get("key", ""))
    # Some messages already begin with the key and its value.
    if message.startswith(key):
        return message
    return f"{key} = {problem.get('value')!r}: {message}"
