"""The recipe of the run tests: the smallest run that has every kind of work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file

from common.config.loading import check
from common.config.recipe import Recipe
from common.step.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.integration.runs.lab import Finished, Lab


STEPS = 2
"""Of `steady`."""


def recipe(
    path: Path, schedule: Schedule = Schedule.ROLLPLEX, **tables: Mapping[str, Any]
) -> Recipe:
    """Args: path: of the model. tables: values that replace those below, by table."""
    tree: dict[str, Any] = {
        "name": f"test-{schedule}",
        "seed": 7,
        "model": {"path": str(path), "train_vision": True},
        "data": {"train": "rollplex.verify.task:rows"},
        "rollout": {"samples_per_group": 2, "max_new_tokens": 12, "max_slots": 8},
        "reward": {"functions": [{"function": "rollplex.verify.task:checksum_reward"}]},
        "algorithm": {"kl_coefficient": 0.01, "learning_rate": 1e-3},
        "training": {"schedule": schedule, "steps": 3, "prompts_per_step": 4},
    }
    for table, values in tables.items():
        tree[table] = tree[table] | dict(values)
    return check(Recipe, tree, source="a run test")


def steady(
    path: Path, schedule: Schedule, *, data: Mapping[str, Any] | None = None, **training: Any
) -> Recipe:
    """An update in which no gradient is small beside epsilon: AdamW makes a step of any other, be
    it rounding."""
    return recipe(
        path,
        schedule,
        data=data or {},
        reward={
            "functions": [{"function": "rollplex.verify.task:checksum_reward"}],
            "on_error": "stop",
        },
        algorithm={"kl_coefficient": 0.01, "learning_rate": 1e-2, "eps": 1e-2},
        training={"steps": STEPS, **training},
    )


async def recorded(alone: Lab, *, groups: int = 4) -> Finished:
    """One rank's run, and what it sampled.

    Args: groups: of a step.
    """
    wanted = steady(alone.model, Schedule.SERIAL, record_responses=True, prompts_per_step=groups)
    (run,) = await alone.succeeded({f"alone-{groups}": wanted})
    return run


def final_tensors(run_dir: Path) -> dict[str, np.ndarray]:
    """Weights, masters and moments of a run's newest checkpoint."""
    return checkpoint_tensors(max((run_dir / "checkpoints").glob("step-*")))


def checkpoint_tensors(folder: Path) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        loaded = load_file(path)
        assert not tensors.keys() & loaded.keys()
        tensors |= loaded
    return tensors


def different(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> list[str]:
    """Names of tensors that are not equal bit for bit."""
    assert left.keys() == right.keys()
    return [name for name in left if left[name].tobytes() != right[name].tobytes()]


def relative_difference(
    expected: Mapping[str, np.ndarray], actual: Mapping[str, np.ndarray]
) -> float:
    """Largest, over tensors, of max|actual - expected| / max|expected|."""
    assert expected.keys() == actual.keys()
    worst = 0.0
    for name, tensor in expected.items():
        scale = float(np.abs(tensor).max())
        if scale:
            worst = max(worst, float(np.abs(tensor - actual[name]).max()) / scale)
    return worst
