"""Several tensor-parallel ranks of every service make the update that one rank makes."""

from __future__ import annotations

import pytest

from common.step.schedule import Schedule
from tests.integration.runs.lab import Lab
from tests.integration.runs.recipes import recipe, relative_difference

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(240)]

STEPS = 2
TABLES = {
    "reward": {
        "functions": [{"function": "rollplex.verify.task:checksum_reward"}],
        "on_error": "stop",
    },
}


@pytest.fixture(scope="module")
def parallel_lab(parallel_node, model):
    return Lab(parallel_node, model)


@pytest.mark.parametrize("schedule", list(Schedule))
async def test_two_ranks_make_the_update_of_one(lab, parallel_lab, schedule):
    training = {"steps": STEPS, "record_responses": True}
    (alone,) = await lab.succeeded(
        {f"alone-{schedule}": recipe(lab.model, schedule, training=training, **TABLES)}
    )
    replay = {"steps": STEPS, "replay_from": str(alone.folder)}
    (parallel,) = await parallel_lab.succeeded(
        {f"parallel-{schedule}": recipe(lab.model, schedule, training=replay, **TABLES)}
    )
    assert relative_difference(alone.tensors, parallel.tensors) <= 1e-5
