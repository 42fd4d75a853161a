"""Training at one tensor-parallel degree and rollout at another make the update of one rank."""

from __future__ import annotations

from datetime import timedelta

import pytest

from common.step.schedule import Schedule
from tests.integration.runs.lab import Lab
from tests.integration.runs.recipes import (
    recorded,
    relative_difference,
    steady,
)

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(600)]

FLOAT32_BYTES = 4
PATIENCE = timedelta(seconds=300)


@pytest.fixture(scope="module")
def alone(node, divided_model):
    return Lab(node, divided_model)


@pytest.fixture(scope="module")
def unequal(unequal_node, divided_model):
    return Lab(unequal_node, divided_model)


@pytest.mark.parametrize("schedule", [Schedule.SERIAL, Schedule.ROLLPLEX])
async def test_unequal_ranks_make_the_update_of_one(alone, unequal, schedule):
    expected = await recorded(alone)
    wanted = steady(unequal.model, schedule, replay_from=str(expected.folder))
    (actual,) = await unequal.succeeded({f"unequal-{schedule}": wanted})
    assert relative_difference(expected.tensors, actual.tensors) <= 1e-5
