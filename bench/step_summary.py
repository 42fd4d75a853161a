"""The figures of one run, from the files that it left."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from bench.moves import move_figures
from bench.step_bound import SERIAL, bound_s, window_parts
from bench.step_flops import ModelSizes, step_flops
from common.rl.lengths import response_lengths
from common.step.plan import StepMode
from common.step.schedule import OWN_WEIGHTS
from rollplex.report.run_files import read_steps, read_timeline

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from bench.step_memory import MemoryTrace
    from bench.step_plan import Planned
    from bench.step_workloads import Workload
    from common.governor.table import CoRunTable
    from rollplex.models import StepRecord
    from rollplex.report.run_files import Span

_GIB = 1 << 30
_WINDOW = "window"


def timed_steps(run_dir: Path, *, warm_up: int) -> list[StepRecord]:
    """Training steps behind the warm-up, in order."""
    return [s for s in read_steps(run_dir) if s.mode is StepMode.TRAIN and s.step >= warm_up]


def spans_of(run_dir: Path, steps: Iterable[StepRecord]) -> list[Span]:
    """Timeline of these steps."""
    epochs = {step.epoch for step in steps}
    return [span for span in read_timeline(run_dir) if span.epoch in epochs]


def typical_step(steps: Sequence[StepRecord]) -> StepRecord:
    """The one whose time is the (lower) median."""
    return sorted(steps, key=lambda step: step.wall)[(len(steps) - 1) // 2]


def run_figures(
    run_dir: Path,
    *,
    warm_up: int,
    work: Workload,
    sizes: ModelSizes,
    memory: MemoryTrace,
    planned: Planned | None,
    peak_tflops: float,
) -> dict[str, Any]:
    """Figures of one run that need no other run.

    Medians are over the timed steps. `control_plane_share` is the part of a step in which no work
    of any kind runs; `graphs_kept`, `prefixes_recomputed` and `graph_peak_gib` say how many
    prefixes kept their graph, how many ran forward again, and what the graphs took; `mfu` is the
    arithmetic of `bench.step_flops` over step time and ceiling; `planned_peak_gib` is the peak that
    `rollplex plan` tells for the same step, and `peak_over_planned` the measured `peak_hbm_gib`
    over it, None without a GPU, as is `peak_over_ledger`. `bench.moves` says how fast contents
    were moved.
    """
    steps = timed_steps(run_dir, warm_up=warm_up)
    spans = spans_of(run_dir, steps)
    walls_s = [step.wall.total_seconds() for step in steps]
    step_s = statistics.median(walls_s)
    names = sorted({name for step in steps for name in step.metrics})
    medians = {
        name: statistics.median(s.metrics[name] for s in steps if name in s.metrics)
        for name in names
    }
    flops = step_flops(
        sizes,
        groups=work.prompts,
        prompt_tokens=work.prompt_tokens,
        vision_tokens=vision_tokens(work),
        response_tokens=int(medians["response_tokens"]),
        train_vision=work.train_vision,
        reference=True,
    )
    start_s, end_s = min(s.start_s for s in spans), max(s.end_s for s in spans)
    device_peak = memory.peak(memory.device_bytes, start_s, end_s)
    ledger_peak = memory.peak(memory.ledger_bytes, start_s, end_s)
    held_peak = memory.peak(memory.held_bytes, start_s, end_s)
    device_gib = None if device_peak is None else device_peak / _GIB
    return {
        "steps": len(steps),
        "step_s": step_s,
        "step_min_s": min(walls_s),
        "step_max_s": max(walls_s),
        "flops": flops,
        "mfu": flops / step_s / (peak_tflops * 1e12),
        "control_plane_share": statistics.median(_idle_share(step, spans) for step in steps),
        "peak_hbm_gib": device_gib,
        **({} if planned is None else planned.figures(device_gib)),
        "peak_ledger_gib": None if ledger_peak is None else ledger_peak / _GIB,
        "peak_over_ledger": device_peak / ledger_peak if device_peak and ledger_peak else None,
        "peak_held_gib": None if held_peak is None else held_peak / _GIB,
        "graph_peak_gib": max(s.metrics.get("graph_bytes_peak", 0.0) for s in steps) / _GIB,
        **medians,
        **move_figures(medians),
    }


def compare(
    figures: Mapping[str, dict[str, Any]],
    *,
    work: Workload,
    seed: int,
    step_numbers: Sequence[int],
    tables: Mapping[str, CoRunTable],
) -> None:
    """Add what needs the serial run: gains, decode slow-down, the bound and the share of it.

    Each engine's runs are compared with its own serial run.

    Args:
        figures: by label; nothing is added to an engine's where no serial run is among them.
        step_numbers: the timed steps, whose lengths say which sequences decode when.
        tables: by label, the co-run rates that its bound is from.
    """
    serials: dict[str, dict[str, Any]] = {}
    for found in figures.values():
        if found["schedule"] == SERIAL:
            serials.setdefault(found["engine"], found)
    windows = [
        window_parts(
            [
                response_lengths(
                    work.lengths, seed=seed, step=step, group=group, samples=work.samples
                )
                for group in range(work.prompts)
            ]
        )
        for step in step_numbers
    ]
    for label, found in figures.items():
        serial = serials.get(found["engine"])
        if serial is None:
            continue
        gain = serial["step_s"] / found["step_s"]
        found |= {
            "gain_over_serial": gain,
            "decode_slowdown": found["window_s"] / serial["window_s"],
        }
        if found["schedule"] in OWN_WEIGHTS:
            continue  # the bound is of one set of processors
        bound = bound_s(
            found["schedule"],
            serial,
            table=tables[label],
            windows=windows,
            prompts=work.prompts,
            train_vision=work.train_vision,
        )
        bound_gain = serial["step_s"] / bound
        found |= {
            "bound_s": bound,
            "bound_gain": bound_gain,
            "share_of_bound": (gain - 1) / (bound_gain - 1) if bound_gain > 1 else None,
        }


def vision_tokens(work: Workload) -> int:
    """Vision tokens of one prompt; two frames of a video become one grid."""
    grids = max(1, work.frames // 2)
    return grids * work.grid[0] * work.grid[1]


def _idle_share(step: StepRecord, spans: Sequence[Span]) -> float:
    """Part of the step that no span of work covers."""
    busy_s = reached_s = 0.0
    mine = [s for s in spans if s.epoch == step.epoch and s.task != _WINDOW]
    for span in sorted(mine, key=lambda span: span.start_s):
        busy_s += max(0.0, span.end_s - max(span.start_s, reached_s))
        reached_s = max(reached_s, span.end_s)
    return max(0.0, 1.0 - busy_s / step.wall.total_seconds())
