"""One training step under each schedule, in the real services, against its bound.

`python -m bench.step --workload A2 --schedules serial,rollplex,fused --steps 5 --warmup 2
--device cuda --json out.json --png timeline.png` starts a node of its own and runs every schedule
on equal weights, prompts and response lengths. A schedule may be named more than once: `serial` at
the end too shows how far the machine drifts; `serial-per-response` and `serial-resident` are
`serial` with a prefix pass a response, and with nothing spilled. `serial@sglang` has SGLang sample
the responses, with the policy's weights read in place, and `serial@sglang-copy` with weights of its
own; both need `--engine-python`. `--scale tiny --device cpu` rehearses it. On GPUs `disaggregated`
needs one more for the rollout, and is measured in a call of its own.

Prints one JSON object with the figures of every schedule; see `bench.step_summary`. The files are
written again after each schedule, so that a run that is cut off leaves what it has. On a GPU a
plain copy of pinned memory is timed at the end, for the rates of spills and restores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.conditions import conditions
from bench.moves import move_figures, pinned_copies
from bench.result_file import write_result
from bench.step_engines import Asked, asked
from bench.step_flops import ModelSizes
from bench.step_inputs import SEED, make_model, recipe, write_rows
from bench.step_memory import MemoryTrace, memory_trace
from bench.step_picture import PicturedStep, draw_steps
from bench.step_plan import StepPlan
from bench.step_summary import compare, run_figures, spans_of, timed_steps, typical_step
from bench.step_workloads import MODELS, WORKLOADS, Workload, most_group_tokens, workload
from common.errors import InvalidArgument, RollplexError
from common.governor.table import H200, load_table
from common.step.schedule import OWN_WEIGHTS
from common.worker.governor import TABLES_FOLDER
from rollplex.client import Client
from rollplex.models import Run, RunState
from rollplex.plan.request import GPU_BYTES
from rollplex.verify.node import temporary_node

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.governor.table import CoRunTable
    from rollplex.models import StepRecord

PEAK_TFLOPS = 780.0
"""bf16 product of 8192-cubed matrices on an H200."""
_CREATE = timedelta(minutes=10)
_PATIENCE = timedelta(seconds=120)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns: 0 if every run ended well."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        labels = asked(options.schedules.split(","))
    except InvalidArgument as error:
        parser.error(str(error))
    if options.engine_python is None and any(one.sglang for one in labels.values()):
        parser.error("--schedules: SGLang needs --engine-python")
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rollplex-step-", dir=options.work) as folder:
        report = asyncio.run(measure(options, labels, Path(folder).absolute()))
    write_result(options.json, report)
    print(json.dumps(report, indent=1))
    return 0 if all("error" not in found for found in report["schedules"].values()) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__)
    add = parser.add_argument
    add("--workload", choices=sorted(WORKLOADS), default="A2")
    add("--model", choices=sorted(MODELS), default="3b", help="shape, at full scale")
    add("--schedules", default="serial,rollplex,fused", help="separated by commas, in this order")
    add("--steps", type=int, default=5, help="timed steps of each schedule")
    add("--warmup", type=int, default=2, help="steps before them")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--scale", choices=("full", "thin", "tiny"), default="full")
    add("--checkpointing", action="store_true", help="recompute the prefix in its backward")
    add("--governor", choices=("auto", "off"), default="auto", help="off: no shares of SMs")
    add("--no-ahead", action="store_true", help="nothing is done for the next step's prompts")
    add("--graphs", default="auto", help="prefix graphs that are kept at a time: n, auto or all")
    add("--table", type=Path, help="co-run rates (TOML or JSON); by default an H200's")
    add("--gpu", choices=sorted(GPU_BYTES), default="h200", help="that the memory is planned for")
    add(
        "--peak-tflops",
        type=float,
        default=PEAK_TFLOPS,
        help="ceiling of a GPU, for the utilisation",
    )
    add("--data-workers", type=int, default=4)
    add("--ranks", type=int, default=1, help="of each service: tensor parallel, a GPU each")
    add("--arena-gib", type=float, default=8.0, help="host memory that the broker may hand out")
    add("--spill-gib", type=float, help="host memory for spilled contents; by default half of all")
    add("--engine-python", type=Path, help="interpreter that has SGLang")
    add("--sglang", type=json.loads, default={}, help="keys of [rollout.sglang], as JSON")
    add("--until-s", type=float, help="no run begins when so many seconds are over")
    add("--work", type=Path, help="where prompts and runs lie meanwhile; by default a temp folder")
    add("--keep", type=Path, help="folder for the runs' files and the services' logs")
    add("--json", type=Path)
    add("--png", type=Path)
    return parser


async def measure(
    options: argparse.Namespace, labels: Mapping[str, Asked], folder: Path
) -> dict[str, Any]:
    """Run every schedule on a node of its own in `folder`. Returns: the report."""
    began_s = time.monotonic()
    work = workload(options.workload, scale=options.scale, model=options.model)
    model = make_model(work, folder / "model")
    rows = write_rows(work, model, folder / "rows", rows=2 * work.prompts)
    _say(f"{2 * work.prompts} prompts of {work.prompt_tokens} tokens written")
    runs: dict[str, Run] = {}
    errors: dict[str, str] = {}
    try:
        async with (
            temporary_node(
                folder / "node",
                device=options.device,
                arena_gib=options.arena_gib,
                settings=_settings(options, labels),
            ) as address,
            await Client.connect(address) as client,
            memory_trace(client, device=options.device) as memory,
        ):
            for label, one in labels.items():
                if options.until_s is not None and time.monotonic() - began_s > options.until_s:
                    _say(f"{label}: not begun")
                    continue
                wanted = recipe(
                    work,
                    one.schedule,
                    rollout=one.rollout(device=options.device, table=options.sglang),
                    model=model,
                    rows=rows,
                    steps=options.warmup + options.steps,
                    checkpointing=options.checkpointing,
                    prefix_graphs=graphs_option(options.graphs),
                    spill_optimizer="auto",
                    ahead=not options.no_ahead,
                    data_workers=options.data_workers,
                )
                try:
                    run = await client.create_run(
                        wanted, run_dir=folder / "runs" / label, deadline=_CREATE
                    )
                    run = await client.wait_run(run.run_id, patience=_PATIENCE)
                except RollplexError as error:
                    errors[label] = f"{type(error).__name__}: {error}"
                else:
                    runs[label] = run
                _say(f"{label}: {errors.get(label) or f'{run.state} {run.reason}'}")
                so_far = _report(options, work, model, labels, runs, errors, memory)
                write_result(options.json, so_far)
    finally:
        if options.keep is not None:
            _keep(folder, options.keep)
    report = _report(options, work, model, labels, runs, errors, memory)
    if options.device == "cuda":
        _add_pinned(report, pinned_copies())
    return report


def _add_pinned(report: dict[str, Any], plain: dict[str, float]) -> None:
    report["pinned_copy_gb_per_s"] = plain
    for found in report["schedules"].values():
        found |= move_figures(found, plain)


def graphs_option(text: str) -> int | str:
    """As the recipe takes it, which refuses what is not legal."""
    return int(text) if text.isdecimal() else text


def _settings(options: argparse.Namespace, labels: Mapping[str, Asked]) -> dict[str, Any]:
    """Of the node."""
    table = None if options.table is None else str(options.table.absolute())
    python = None if options.engine_python is None else str(options.engine_python.absolute())
    apart = _apart(labels)
    if options.device == "cuda" and len(apart) > 1:
        raise SystemExit(
            f"--schedules {options.schedules}: on GPUs, measure {', '.join(OWN_WEIGHTS)} in a call "
            "of its own: its rollout has GPUs of its own"
        )
    gpus = "own" if apart == {True} else "shared"
    return {
        "governor": options.governor,
        "governor_table": table,
        "spill_gib": options.spill_gib,
        "rollout_gpus": gpus,
        "engine_python": python,
        "train_tp": options.ranks,
        "rollout_tp": options.ranks,
    }


def _apart(labels: Mapping[str, Asked]) -> set[bool]:
    """Whether the schedules' rollouts have GPUs of their own."""
    return {one.schedule in OWN_WEIGHTS for one in labels.values()}


def _gpus(options: argparse.Namespace, labels: Mapping[str, Asked]) -> int:
    """That a step has."""
    own = options.device == "cuda" and _apart(labels) == {True}
    return 2 * options.ranks if own else options.ranks


def _report(
    options: argparse.Namespace,
    work: Workload,
    model: Path,
    labels: Mapping[str, Asked],
    runs: dict[str, Run],
    errors: dict[str, str],
    memory: MemoryTrace,
) -> dict[str, Any]:
    sizes = ModelSizes.of(model)
    plan = _plan(options, work, model)
    tables = {label: _table(options, run) for label, run in runs.items()}
    figures: dict[str, dict[str, Any]] = {}
    pictured: list[PicturedStep] = []
    failed: dict[str, dict[str, Any]] = {}
    for label, one in labels.items():
        run = runs.get(label)
        steps = [] if run is None else timed_steps(Path(run.run_dir), warm_up=options.warmup)
        if run is None or run.state is not RunState.SUCCEEDED or not steps:
            none = errors.get(label, "not begun")
            reason = none if run is None else f"{run.state}: {run.reason}"
            failed[label] = {"schedule": one.schedule, "engine": one.engine, "error": reason}
            continue
        run_dir = Path(run.run_dir)
        figures[label] = {
            "schedule": one.schedule,
            "engine": one.engine,
            "restarts": run.restarts,
            **run_figures(
                run_dir,
                warm_up=options.warmup,
                work=work,
                sizes=sizes,
                memory=memory,
                planned=None if one.sglang else plan.of(one.schedule),
                peak_tflops=options.peak_tflops * _gpus(options, labels),
            ),
        }
        pictured.append(_pictured(label, run_dir, typical_step(steps)))
    compare(figures, work=work, seed=SEED, step_numbers=_timed(options), tables=tables)
    if options.png is not None and pictured:
        title = f"workload {options.workload}, {options.scale}, {options.device}"
        draw_steps(pictured, memory, options.png, title=title)
    return {
        "command": " ".join(["python -m bench.step", *sys.argv[1:]]),
        "conditions": conditions(options.device),
        "workload": {
            "name": options.workload,
            "model": work.model.stem,
            "lengths": work.lengths.model_dump(),
        },
        "governor": options.governor,
        "prefix_graphs": options.graphs,
        "ahead": not options.no_ahead,
        "activation_checkpointing": options.checkpointing,
        "ranks": options.ranks,
        "schedules": {label: figures.get(label) or failed[label] for label in labels},
        "rates": {label: table.model_dump(mode="json") for label, table in tables.items()},
    }


def _timed(options: argparse.Namespace) -> range:
    """Numbers of the timed steps."""
    return range(options.warmup, options.warmup + options.steps)


def _plan(options: argparse.Namespace, work: Workload, model: Path) -> StepPlan:
    return StepPlan(
        work=work,
        model=model,
        device=options.device,
        gpu=options.gpu,
        group_tokens=most_group_tokens(work, seed=SEED, steps=_timed(options)),
        graphs=graphs_option(options.graphs),
        # what "auto" is
        spill_optimizer=options.device == "cuda",
        checkpointing=options.checkpointing,
        ahead=not options.no_ahead,
        ranks=options.ranks,
    )


def _pictured(label: str, run_dir: Path, typical: StepRecord) -> PicturedStep:
    return PicturedStep(
        label=label,
        step_s=typical.wall.total_seconds(),
        spans=spans_of(run_dir, [typical]),
    )


def _table(options: argparse.Namespace, run: Run) -> CoRunTable:
    """The rates that the run has measured; without any, those that it went by."""
    measured = Path(run.run_dir) / TABLES_FOLDER
    if options.table is None and measured.is_dir():
        return load_table(measured)
    return H200 if options.table is None else load_table(options.table)


def _keep(folder: Path, target: Path) -> None:
    """Copy the runs' files and the services' logs."""
    for source in (folder / "runs", folder / "node" / "logs"):
        if source.is_dir():
            shutil.copytree(source, target / source.name, dirs_exist_ok=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
