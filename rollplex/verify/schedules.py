"""The same run under each schedule, in the real services, and how its weights compare.

`serial` records its responses. On a CPU `disaggregated` and `rollplex` sample their own and have to
end with the same bits; `fused` is fed the recorded ones and has to end close to `serial`. On a GPU
nothing is equal bit for bit, so the others are fed the recorded ones; `disaggregated`, which needs
GPUs of its own for the rollout, is left out there.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import load_file

from common.config.loading import check
from common.config.recipe import Recipe
from common.errors import FailedPrecondition
from common.step.schedule import OWN_WEIGHTS, Schedule
from rollplex.client import Client
from rollplex.models import Run, RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STEPS = 5
PATIENCE = timedelta(seconds=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleReport:
    """How the schedules' weights and log-probabilities compare."""

    serial_vs_disaggregated_bitwise: bool | None
    """Of weights and of sampled responses; None: `disaggregated` was left out."""
    disaggregated_engine_logprob_diff: float | None
    serial_vs_rollplex_bitwise: bool
    serial_vs_rollplex_rel_diff: float
    serial_vs_fused_rel_diff: float
    """Largest, over tensors, of max|fused - serial| / max|serial|."""
    fused_engine_logprob_diff: float
    """Largest |log-probability of the engine - of the trainer| in the last `fused` step."""
    prefix_overlap_fraction: Mapping[str, float]
    """Share of prefix work inside the decode window, by schedule."""


async def compare_schedules(
    address: str,
    folder: Path,
    model: Path,
    *,
    device: str,
    say: Callable[[str], object],
) -> ScheduleReport:
    """Run all schedules one after the other on the node at `address`."""
    runs: dict[Schedule, Run] = {}
    fed = {Schedule.FUSED} if device == "cpu" else {Schedule.ROLLPLEX, Schedule.FUSED}
    asked = [one for one in Schedule if device == "cpu" or one not in OWN_WEIGHTS]
    async with await Client.connect(address) as client:
        for schedule in asked:
            say(f"{STEPS} steps of {schedule}")
            replay = Path(runs[Schedule.SERIAL].run_dir) if schedule in fed else None
            recipe = verification_recipe(model, schedule, replay_from=replay)
            run = await client.create_run(recipe, run_dir=folder / schedule)
            run = await client.wait_run(run.run_id, patience=PATIENCE)
            if run.state is not RunState.SUCCEEDED:
                raise FailedPrecondition(f"run {run.run_id} is {run.state}: {run.reason}")
            runs[schedule] = run
    weights = {schedule: final_weights(Path(run.run_dir)) for schedule, run in runs.items()}
    serial = weights[Schedule.SERIAL]
    apart = runs.get(Schedule.DISAGGREGATED)
    return ScheduleReport(
        serial_vs_disaggregated_bitwise=None
        if apart is None
        else _equal(serial, weights[Schedule.DISAGGREGATED])
        and _equal(*(_responses(Path(run.run_dir)) for run in (runs[Schedule.SERIAL], apart))),
        disaggregated_engine_logprob_diff=None
        if apart is None
        else apart.latest["mismatch_abs_max"],
        serial_vs_rollplex_bitwise=_equal(serial, weights[Schedule.ROLLPLEX]),
        serial_vs_rollplex_rel_diff=_relative_difference(serial, weights[Schedule.ROLLPLEX]),
        serial_vs_fused_rel_diff=_relative_difference(serial, weights[Schedule.FUSED]),
        fused_engine_logprob_diff=runs[Schedule.FUSED].latest["mismatch_abs_max"],
        prefix_overlap_fraction={
            schedule: run.latest["prefix_overlap_fraction"] for schedule, run in runs.items()
        },
    )


def verification_recipe(
    model: Path, schedule: Schedule, *, replay_from: Path | None = None
) -> Recipe:
    """A short run with every kind of work: KL to the reference, trained tower, long responses."""
    tree = {
        "name": f"verify-{schedule}",
        "seed": 7,
        "model": {"path": str(model), "train_vision": True},
        "data": {"train": "rollplex.verify.task:rows"},
        "rollout": {"samples_per_group": 4, "max_new_tokens": 24, "max_slots": 16},
        "reward": {"functions": [{"function": "rollplex.verify.task:checksum_reward"}]},
        "algorithm": {"kl_coefficient": 0.01, "learning_rate": 1e-3},
        "training": {
            "schedule": schedule,
            "steps": STEPS,
            "prompts_per_step": 8,
            "record_responses": True,
            "replay_from": None if replay_from is None else str(replay_from),
        },
    }
    return check(Recipe, tree, source="rollplex verify")


def final_weights(run_dir: Path) -> dict[str, np.ndarray]:
    """All tensors of a run's newest checkpoint, the trainer's included."""
    folder = max((run_dir / "checkpoints").glob("step-*"))
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def _responses(run_dir: Path) -> dict[str, np.ndarray]:
    """What a run has sampled, by step and group."""
    return {
        f"{path.stem}.{name}": tensor
        for path in sorted((run_dir / "responses").glob("step-*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def _equal(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].tobytes() == right[name].tobytes() for name in left
    )


def _relative_difference(
    expected: Mapping[str, np.ndarray], actual: Mapping[str, np.ndarray]
) -> float:
    if expected.keys() != actual.keys():
        return float("inf")
    worst = 0.0
    for name, tensor in expected.items():
        scale = float(np.abs(tensor).max())
        difference = float(np.abs(tensor - actual[name]).max())
        worst = max(worst, difference / scale if scale else difference)
    return worst
