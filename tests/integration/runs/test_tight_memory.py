"""With room for few prefixes every schedule still ends, and makes the same update."""

from __future__ import annotations

import pytest

from common.step.schedule import Schedule
from tests.integration.runs.lab import Lab
from tests.integration.runs.recipes import different, recipe, relative_difference

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(480)]

GROUPS = 6
DATA = {"train": "tests.integration.runs.task:wordy_rows"}
ROLLOUT = {"max_slots": 4}
TRAINING = {"prompts_per_step": GROUPS, "steps": 2, "step_deadline_s": 120.0}


def wanted(model, schedule=Schedule.ROLLPLEX, **training):
    return recipe(model, schedule, data=DATA, rollout=ROLLOUT, training=TRAINING | training)


@pytest.fixture
async def roomy(lab):
    """With room for everything; its responses are recorded."""
    (serial,) = await lab.succeeded(
        {"roomy": wanted(lab.model, Schedule.SERIAL, record_responses=True)}
    )
    return serial


@pytest.mark.parametrize("spill", [False, True], ids=["kept", "spilled"])
@pytest.mark.parametrize("schedule", list(Schedule))
async def test_little_room_changes_nothing(roomy, tight_node, model, schedule, spill):
    """Leases may take the room of storages that are away, and must leave it when it is wanted."""
    tight = Lab(tight_node, model)
    training = {"spill_optimizer": spill, "spill_reference": spill}
    if schedule is Schedule.FUSED:
        training["replay_from"] = str(roomy.folder)
    name = f"tight-{schedule}-{spill}"
    (finished,) = await tight.succeeded({name: wanted(model, schedule, **training)})
    assert finished.run.restarts == 0
    if schedule is Schedule.FUSED:
        assert relative_difference(roomy.tensors, finished.tensors) <= 1e-5
    else:
        assert different(roomy.tensors, finished.tensors) == []


async def test_a_prefix_that_runs_again_changes_no_bit(roomy, lab, model):
    few, every = await lab.succeeded(
        {
            "one-graph": wanted(model, prefix_graphs=1),
            "all-graphs": wanted(model, prefix_graphs="all"),
        }
    )
    assert different(roomy.tensors, few.tensors) == []
    assert different(roomy.tensors, every.tensors) == []
    for step in few.steps:
        metrics = step["metrics"]
        assert (metrics["graphs_kept"], metrics["prefixes_recomputed"]) == (1, GROUPS - 1)
        assert 0 < metrics["time_prefix_recompute_s"] < metrics["time_prefix_backward_s"]
    for step in every.steps:
        assert (step["metrics"]["graphs_kept"], step["metrics"]["prefixes_recomputed"]) == (
            GROUPS,
            0,
        )
