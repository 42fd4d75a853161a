"""One training step of TRL's GRPOTrainer on workload T, to hold steps of `bench.step` against.

`python -m bench.trl_step --device cuda --warmup 1 --steps 2 --json trl.json` trains a model of the
same shape, weights and prompts, without vLLM: all responses are generated at once, then scored and
trained in micro-batches with gradient checkpointing. `--scale tiny --device cpu` rehearses it.
Needs `trl==1.16.0` and torchvision, which this project does not install.

Prints one JSON object: seconds of every timed step and of its phases, medians, peak of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import resource
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.conditions import conditions
from bench.step_inputs import make_model, write_rows
from bench.step_workloads import Workload, workload
from bench.trl_vision import batched_vision_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.trl_trainer import StepClock

_WORKLOAD = "T"
_NEEDED = ("trl", "datasets", "accelerate", "torchvision")
_MICRO_BATCH = 8
_GIB = 2.0**30


def main(argv: Sequence[str] | None = None) -> int:
    """Returns: 0."""
    options = _parser().parse_args(argv)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"python -m bench.trl_step also needs {', '.join(missing)}: "
            "pip install trl==1.16.0 torchvision"
        )
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rollplex-trl-", dir=options.work) as folder:
        report = measure(options, Path(folder).absolute())
    text = json.dumps(report, indent=1)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.trl_step", description=__doc__)
    add = parser.add_argument
    add("--steps", type=int, default=5, help="timed steps")
    add("--warmup", type=int, default=1, help="steps before them")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--scale", choices=("full", "tiny"), default="full")
    add("--micro-batch", type=int, help="responses of one pass; by default 8, or what divides")
    add(
        "--vision",
        choices=("batched", "library"),
        default="batched",
        help="batched: windows of equal length in one attention call; library: one by one",
    )
    add("--work", type=Path, help="where prompts lie meanwhile; by default a temp folder")
    add("--json", type=Path)
    return parser


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train in `folder`. Returns: the report."""
    from bench.trl_trainer import StepClock, make_trainer

    work = workload(_WORKLOAD, scale=options.scale)
    micro_batch = _micro_batch(options.micro_batch, work.prompts * work.samples)
    model = make_model(work, folder / "model")
    rows = write_rows(work, model, folder / "rows", rows=2 * work.prompts)
    print(f"{2 * work.prompts} prompts of {work.prompt_tokens} tokens written", file=sys.stderr)
    clock = StepClock(torch.device(options.device), warm_up=options.warmup)
    trainer = make_trainer(
        work,
        clock,
        model=model,
        rows=rows,
        device=options.device,
        steps=options.warmup + options.steps,
        micro_batch=micro_batch,
        output=folder / "trainer",
    )
    batched = options.vision == "batched"
    with batched_vision_attention() if batched else contextlib.nullcontext():
        trainer.train()
    return {
        "command": " ".join(["python -m bench.trl_step", *sys.argv[1:]]),
        "conditions": conditions(
            options.device,
            packages=("torch", "transformers", "trl", "datasets", "accelerate", "torchvision"),
        ),
        "workload": {"name": _WORKLOAD, "lengths": work.lengths.model_dump()},
        "scale": options.scale,
        "micro_batch": micro_batch,
        "vision_attention": options.vision,
        "activation_checkpointing": True,
        **_figures(clock, work, warm_up=options.warmup),
        **_peaks(options.device),
    }


def _micro_batch(asked: int | None, responses: int) -> int:
    if asked is None:
        return math.gcd(_MICRO_BATCH, responses)
    if asked < 1 or responses % asked:
        legal = [size for size in range(1, responses + 1) if responses % size == 0]
        raise SystemExit(f"--micro-batch {asked}: a step has {responses} responses; {legal=}")
    return asked


def _figures(clock: StepClock, work: Workload, *, warm_up: int) -> dict[str, Any]:
    """Times in seconds by step, warm-up left out, and their medians.

    `input_s` is what TRL does around generation and scoring: it processes the pixels twice.
    """
    from bench.trl_trainer import GENERATION, REFERENCE, ROLLOUT

    steps = clock.step_s[warm_up:]
    phases = clock.phases[warm_up:]
    times = {
        "step_s": steps,
        "generation_s": [phase[GENERATION] for phase in phases],
        "reference_s": [phase[REFERENCE] for phase in phases],
        "input_s": [phase[ROLLOUT] - phase[GENERATION] - phase[REFERENCE] for phase in phases],
        "training_s": [
            step_s - phase[ROLLOUT] for step_s, phase in zip(steps, phases, strict=True)
        ],
    }
    medians = {name: statistics.median(values) for name, values in times.items()}
    responses = work.prompts * work.samples
    return {
        "steps": len(steps),
        "warm_up_step_s": clock.step_s[:warm_up],
        "median": medians,
        **times,
        "prompt_tokens": work.prompts * work.prompt_tokens,
        "response_tokens": responses * work.lengths.max_tokens,
        "response_tokens_per_s": responses * work.lengths.max_tokens / medians["step_s"],
    }


def _peaks(device: str) -> dict[str, float]:
    """GiB, of the timed steps on a GPU and of the process's life on a CPU."""
    if device == "cpu":
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak_rss_gib": kib * 1024 / _GIB}
    return {
        "peak_hbm_gib": torch.cuda.max_memory_reserved() / _GIB,
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / _GIB,
    }


if __name__ == "__main__":
    sys.exit(main())
