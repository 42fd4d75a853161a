"""What fits: the longest video prompt and the most prompts a step, by memory budget.

`python -m bench.fit --budgets 40,80,130 --models 3b,7b --device cuda --json fit.json` runs the real
services under each budget (`hbm_budget_gib`), some steps a try, with memory governed by phases as
Rollplex does and with everything resident: no spilled optimizer, every graph kept. A try that is
refused, runs out of memory or takes more than the budget does not fit; its reason is kept. The file
is written again after each try, so that a run that is cut off leaves what it has.

A search begins at what `rollplex plan` says. `--resolution 0.05` ends it when the smallest size
that does not fit is within 5 % of the largest that does; a good plan then costs two tries.

`--estimate` also tells what `rollplex plan` says for the same points. `--scale tiny --device cpu`
rehearses it: then a budget is the memory of the host that the broker may hand out, and what a
process allocates itself is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.budgeted_node import Attempt, BudgetedNode, Outcome, budgeted_node
from bench.conditions import conditions
from bench.fit_points import Governing, Point, Question, most, planned_largest, sized
from bench.fit_search import Search
from bench.result_file import write_result
from bench.step_inputs import make_model, recipe, write_rows
from bench.step_workloads import MODELS, WORKLOADS, Workload, workload
from common.errors import RollplexError
from common.step.schedule import Schedule
from rollplex.plan.request import GPU_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

_CLIPS = 2
"""Different videos: what is in them takes no memory."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns: 0 if every search came to an end."""
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="rollplex-fit-", dir=options.work) as folder:
        fit = Fit(options, Path(folder).absolute())
        asyncio.run(fit.run())
    print(json.dumps(fit.report, indent=1))
    return 0 if all("error" not in found for found in fit.report["points"].values()) else 1


def numbers(text: str) -> list[float]:
    """Positive numbers, separated by commas."""
    found = [float(part) for part in text.split(",")]
    if not all(number > 0 for number in found):
        raise ValueError(text)
    return found


def _some(legal: Sequence[str], text: str) -> list[str]:
    asked = text.split(",")
    if not set(asked) <= set(legal):
        raise argparse.ArgumentTypeError(f"{text!r}: legal are {', '.join(legal)}")
    return asked


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fit", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("--budgets", type=numbers, default="40,80,130", help="GiB, separated by commas")
    add("--models", type=lambda t: _some(sorted(MODELS), t), default="3b,7b")
    add("--questions", type=lambda t: _some(list(Question), t), default=",".join(Question))
    add("--governing", type=lambda t: _some(list(Governing), t), default=",".join(Governing))
    add("--workload", choices=sorted(WORKLOADS), default="A2", help="one of its sizes is searched")
    add("--prompts", type=int, help="a step, where the prompt is searched; else the workload's")
    add("--steps", type=int, default=2, help="of a try: the first one does work for the second")
    add("--resolution", type=float, default=0.0, help="of the size: how exactly it is found")
    add("--schedule", choices=list(Schedule), default=Schedule.ROLLPLEX)
    add("--estimate", action="store_true", help="tell what rollplex plan says too")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--scale", choices=("full", "tiny"), default="full")
    add("--most", type=int, help="largest size that is tried")
    add("--gpu", choices=sorted(GPU_BYTES), default="h200", help="that the memory is planned for")
    add("--data-workers", type=int, default=4)
    add("--arena-gib", type=float, default=32.0, help="host memory of the broker of a GPU")
    add("--spill-gib", type=float, help="host memory for spilled contents; by default half of all")
    add("--work", type=Path, help="folder for prompts and runs; by default a temp folder")
    add("--json", type=Path)
    return parser


class Fit:
    """All searches; `report` grows with each try."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._tries = 0
        self.report: dict[str, Any] = {
            "command": " ".join(["python -m bench.fit", *sys.argv[1:]]),
            "conditions": conditions(options.device),
            "workload": options.workload,
            "schedule": options.schedule,
            "steps": options.steps,
            "resolution": options.resolution,
            "points": {},
        }

    async def run(self) -> None:
        """One node a budget; what keeps it from starting is the error of all its points."""
        options = self._options
        models = {name: self._model(name) for name in options.models}
        for budget_gib in options.budgets:
            points = [
                Point(
                    model=model,
                    question=Question(question),
                    governing=Governing(governing),
                    budget_gib=budget_gib,
                )
                for model in options.models
                for question in options.questions
                for governing in options.governing
            ]
            try:
                async with budgeted_node(
                    self._folder / f"node-{budget_gib:g}",
                    device=options.device,
                    budget_gib=budget_gib,
                    arena_gib=options.arena_gib,
                    spill_gib=options.spill_gib,
                ) as node:
                    for point in points:
                        await self._search(node, point, models[point.model])
            except RollplexError as error:
                for point in points:
                    found = self.report["points"].setdefault(point.name, {"tries": []})
                    if "largest" not in found:
                        found["error"] = f"{type(error).__name__}: {error}"
                self._write()

    def _model(self, name: str) -> Path:
        return make_model(self._workload(name), self._folder / f"model-{name}")

    def _workload(self, model: str) -> Workload:
        options = self._options
        work = workload(options.workload, scale=options.scale, model=model)
        return replace(work, prompts=options.prompts or work.prompts)

    async def _search(self, node: BudgetedNode, point: Point, model: Path) -> None:
        options, work = self._options, self._workload(point.model)
        planned = planned_largest(
            work,
            point,
            model=model,
            schedule=options.schedule,
            device=options.device,
            gpu=options.gpu,
            steps=options.steps,
        )
        limit = most(work, point.question)
        search = Search(
            least=1,
            most=min(limit, options.most or limit),
            guess=1 if planned is None else planned,
            resolution=options.resolution,
        )
        found: dict[str, Any] = {"tries": []}
        self.report["points"][point.name] = found
        while (size := search.next) is not None:
            asked = sized(work, point.question, size)
            tried = await self._try(node, point, asked, model)
            found["tries"].append(_figures(asked, tried))
            _say(f"{point.name}: {size}: {tried.outcome} {tried.reason}")
            if tried.outcome is Outcome.FAILED:
                found["error"] = tried.reason
                self._write()
                return
            search.tell(size, fits=tried.outcome is Outcome.FITS)
            self._write()
        found["largest"] = _sizes(work, point, search.largest)
        found["too_large"] = _sizes(work, point, search.too_large)
        found["at_the_limit"] = search.largest == search.most
        if options.estimate:
            found["planned_largest"] = _sizes(work, point, planned)
            _say(f"{point.name}: {found['largest']}, planned {found['planned_largest']}")
        self._write()

    async def _try(self, node: BudgetedNode, point: Point, asked: Workload, model: Path) -> Attempt:
        self._tries += 1
        folder = self._folder / f"try-{self._tries}"
        rows = await asyncio.to_thread(
            write_rows, asked, model, folder / "rows", rows=asked.prompts, clips=_CLIPS
        )
        made = recipe(
            asked,
            self._options.schedule,
            model=model,
            rows=rows,
            steps=self._options.steps,
            checkpointing=False,
            prefix_graphs=point.governing.prefix_graphs,
            spill_optimizer=point.governing.spill_optimizer,
            ahead=True,
            data_workers=self._options.data_workers,
        )
        try:
            return await node.attempt(made, folder / "run")
        finally:
            shutil.rmtree(folder)

    def _write(self) -> None:
        write_result(self._options.json, self.report)


def _sizes(work: Workload, point: Point, size: int | None) -> dict[str, int] | None:
    """None: not even the smallest fits."""
    if size is None:
        return None
    found = sized(work, point.question, size)
    return {
        "prompt_tokens": found.prompt_tokens,
        "frames": found.frames,
        "prompts": found.prompts,
    }


def _figures(asked: Workload, tried: Attempt) -> dict[str, Any]:
    last = tried.steps[-1] if tried.steps else None
    return {
        "prompt_tokens": asked.prompt_tokens,
        "frames": asked.frames,
        "prompts": asked.prompts,
        "outcome": tried.outcome,
        "reason": tried.reason,
        "peak_gib": tried.peak_gib,
        "step_s": last.wall.total_seconds() if last else None,
        "graphs_kept": last.metrics.get("graphs_kept") if last else None,
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
