"""Step time of every schedule as the memory budget shrinks.

`python -m bench.budget --budgets 130,95,80 --device cuda --json out.json --png out.png`
starts a node for each budget (`hbm_budget_gib`), and runs every schedule on it. A run that is
refused, runs out of memory or takes more than the budget does not fit, which is kept with its
reason and marked in the picture. Both files are written again after each run. `--scale tiny
--device cpu` rehearses it: then a budget is the memory of the host that the broker may hand out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.budget_picture import curves, draw_curves
from bench.budgeted_node import Attempt, Outcome, budgeted_node
from bench.conditions import conditions
from bench.fit import numbers
from bench.result_file import write_result
from bench.step import graphs_option
from bench.step_inputs import make_model, recipe, write_rows
from bench.step_workloads import MODELS, WORKLOADS, workload
from common.errors import RollplexError
from common.step.schedule import OWN_WEIGHTS, Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.budgeted_node import BudgetedNode
    from common.config.recipe import Recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Returns: 0 if no run failed for another reason than memory."""
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="rollplex-budget-", dir=options.work) as folder:
        report = asyncio.run(measure(options, Path(folder).absolute()))
    print(json.dumps(report, indent=1))
    return int(any(point["outcome"] == Outcome.FAILED for point in report["points"]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.budget", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("--budgets", type=numbers, default="130,110,95,80,70", help="GiB, separated by commas")
    one_gpu = [schedule for schedule in Schedule if schedule not in OWN_WEIGHTS]
    add("--schedules", default=",".join(one_gpu), help="separated by commas")
    add("--workload", choices=sorted(WORKLOADS), default="A2")
    add("--model", choices=sorted(MODELS), default="3b", help="shape, at full scale")
    add("--steps", type=int, default=3, help="timed steps of each run")
    add("--warmup", type=int, default=1, help="steps before them")
    add("--graphs", default="auto", help="prefix graphs that are kept at a time: n, auto or all")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--scale", choices=("full", "tiny"), default="full")
    add("--data-workers", type=int, default=4)
    add("--arena-gib", type=float, default=8.0, help="host memory of the broker of a GPU")
    add("--spill-gib", type=float, help="host memory for spilled contents; by default half of all")
    add("--work", type=Path, help="folder for prompts and runs; by default a temp folder")
    add("--json", type=Path)
    add("--png", type=Path)
    return parser


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run every schedule under every budget. Returns: the report."""
    recipes = _recipes(options, folder)
    points: list[dict[str, Any]] = []
    report: dict[str, Any] = {
        "command": " ".join(["python -m bench.budget", *sys.argv[1:]]),
        "conditions": conditions(options.device),
        "workload": options.workload,
        "model": options.model,
        "points": points,
    }
    for budget_gib in options.budgets:
        try:
            async with budgeted_node(
                folder / f"node-{budget_gib:g}",
                device=options.device,
                budget_gib=budget_gib,
                arena_gib=options.arena_gib,
                spill_gib=options.spill_gib,
            ) as node:
                for schedule, asked in recipes.items():
                    run_dir = folder / "runs" / f"{schedule}-{budget_gib:g}"
                    points.append(
                        await _point(node, schedule, asked, run_dir, options)
                        | {"budget_gib": budget_gib}
                    )
                    _write(options, report)
        except RollplexError as error:
            done = {point["schedule"] for point in points if point["budget_gib"] == budget_gib}
            points += [
                {
                    "schedule": schedule,
                    "budget_gib": budget_gib,
                    "outcome": Outcome.FAILED,
                    "reason": f"{type(error).__name__}: {error}",
                }
                for schedule in recipes
                if schedule not in done
            ]
            _write(options, report)
    return report


def _recipes(options: argparse.Namespace, folder: Path) -> dict[str, Recipe]:
    """By schedule; all on the same prompts."""
    asked = options.schedules.split(",")
    if not set(asked) <= set(Schedule):
        raise SystemExit(f"--schedules: {options.schedules!r}; legal are {', '.join(Schedule)}")
    work = workload(options.workload, scale=options.scale, model=options.model)
    model = make_model(work, folder / "model")
    rows = write_rows(work, model, folder / "rows", rows=2 * work.prompts)
    return {
        schedule: recipe(
            work,
            schedule,
            model=model,
            rows=rows,
            steps=options.warmup + options.steps,
            checkpointing=False,
            prefix_graphs=graphs_option(options.graphs),
            spill_optimizer=True,
            ahead=True,
            data_workers=options.data_workers,
        )
        for schedule in asked
    }


async def _point(
    node: BudgetedNode, schedule: str, asked: Recipe, run_dir: Path, options: argparse.Namespace
) -> dict[str, Any]:
    tried = await node.attempt(asked, run_dir)
    print(f"{run_dir.name} GiB: {tried.outcome} {tried.reason}", file=sys.stderr, flush=True)
    found = {
        "schedule": schedule,
        "outcome": tried.outcome,
        "reason": tried.reason,
        "peak_gib": tried.peak_gib,
    }
    return found | (_times(tried, options.warmup) if tried.outcome is Outcome.FITS else {})


def _times(tried: Attempt, warm_up: int) -> dict[str, Any]:
    timed = [step for step in tried.steps if step.step >= warm_up]
    times_s = [step.wall.total_seconds() for step in timed]
    return {
        "step_s": statistics.median(times_s),
        "step_min_s": min(times_s),
        "step_max_s": max(times_s),
        **{
            name: statistics.median(step.metrics.get(name, 0.0) for step in timed)
            for name in ("graphs_kept", "prefixes_recomputed")
        },
    }


def _write(options: argparse.Namespace, report: dict[str, Any]) -> None:
    write_result(options.json, report)
    if options.png is not None:
        title = f"workload {options.workload}, {options.model}, {options.scale}, {options.device}"
        draw_curves(curves(report["points"]), options.png, title=title)


if __name__ == "__main__":
    sys.exit(main())
