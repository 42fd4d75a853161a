"""What is checked before a run is accepted. Users' code runs in processes of its own only."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.data.forkserver import forkserver
from common.errors import DeadlineExceeded, InvalidArgument, RollplexError
from common.service.parent_watch import die_with_parent

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess
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
    out, err = (recipe_file.with_name(f"{module}.{stream}") for stream in ("out", "err"))
    process = forkserver().Process(target=_carry_out, args=(module, recipe_file, out, err))
    try:
        # Until the forkserver has imported everything it does not answer.
        await asyncio.to_thread(process.start)
    except (OSError, EOFError) as error:
        raise PreflightBroken(f"{module} could not be started: {error!r}") from error
    try:
        async with asyncio.timeout(deadline_s):
            await _ended(process)
        status = process.exitcode
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"{module} took over {deadline_s:g} s; does loading the data or importing the reward "
            "functions hang?"
        ) from error
    finally:
        process.kill()
        process.join()
        process.close()
    try:
        report = json.loads(out.read_text().strip().splitlines()[-1])
        if report["ok"] or report["errors"]:
            return dict(report)
    except (OSError, ValueError, LookupError, TypeError):
        pass
    text = err.read_text(errors="replace").strip()[-_TEXT_LIMIT:] if err.exists() else ""
    raise PreflightBroken(f"{module} ended with status {status} and no report: {text}")


def _carry_out(module: str, recipe_file: Path, out: Path, err: Path) -> None:
    """In the check's own process: what `python -m module` does, its output in two files."""
    die_with_parent()
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.exit(importlib.import_module(module).main(["--recipe", str(recipe_file)]))


async def _ended(process: ForkServerProcess) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(process.sentinel, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(process.sentinel)
    process.join()


def _line(problem: dict[str, Any]) -> str:
    message = str(problem.get("message", ""))
    key = str(problem.get("key", ""))
    # Some messages already begin with the key and its value.
    if message.startswith(key):
        return message
    return f"{key} = {problem.get('value')!r}: {message}"
