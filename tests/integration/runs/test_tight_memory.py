"""With room for few prefixes every schedule still ends, and makes the same update."""

from __future__ import annotations

import pytest

from common.step.schedule import OWN_WEIGHTS, Schedule
from rollplex.models import RunState
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


CASES = [
    (schedule, spill)
    for schedule in Schedule
    for spill in (False, True)
    # Weights of its own take what leases have otherwise.
    if spill or schedule not in OWN_WEIGHTS
]


@pytest.mark.parametrize(("schedule", "spill"), CASES, ids=str)
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


async def test_no_attempt_at_a_step_that_cannot_fit_waits_for_room(tight_node, model):
    tight = Lab(tight_node, model)
    (refused,) = await tight.finished({"tight-refused": wanted(model, Schedule.DISAGGREGATED)})
    assert refused.run.state is RunState.FAILED
    assert "waiting cannot help" in refused.run.reason


async def test_a_prefix_that_runs_again_changes_no_bit(roomy, lab, model):
    replay = str(roomy.folder)
    few, every = await lab.succeeded(
        {
            name: wanted(model, Schedule.FUSED, prefix_graphs=limit, replay_from=replay)
            for name, limit in (("one-graph", 1), ("all-graphs", "all"))
        }
    )
    assert different(few.tensors, every.tensors) == []
    assert relative_difference(roomy.tensors, few.tensors) <= 1e-5
    for step in few.steps:
        metrics = step["metrics"]
        assert graphs(step) == (1, GROUPS - 1)
        assert 0 < metrics["time_prefix_recompute_s"] < metrics["time_prefix_backward_s"]
    for step in every.steps:
        assert graphs(step) == (GROUPS, 0)


async def test_no_prefix_runs_ahead_without_keeping_its_graph(roomy, lab, model):
    (one,) = await lab.succeeded({"one-ahead": wanted(model, Schedule.ROLLPLEX, prefix_graphs=1)})
    assert different(roomy.tensors, one.tensors) == []
    assert [graphs(step) for step in one.steps] == [(GROUPS, 0)] * len(one.steps)
    # One graph at a time: that of the group which trains, but for the first one's.
    for step in one.steps:
        spans = [span for span in one.timeline if span["step"] == step["step"]]
        closed_ns = max(span["end_ns"] for span in spans if span["task"] == "window")
        begun = [span["start_ns"] for span in spans if span["task"] == "policy_prefix"]
        assert len(begun) == GROUPS
        assert sum(start_ns < closed_ns for start_ns in begun) == 1


def graphs(step):
    metrics = step["metrics"]
    return metrics["graphs_kept"], metrics["prefixes_recomputed"]
