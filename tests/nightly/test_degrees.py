"""Four ranks on either side make the update of one."""

from __future__ import annotations

import pytest

from common.errors import InvalidArgument
from common.step.schedule import Schedule
from tests.integration.runs.lab import Lab
from tests.integration.runs.recipes import steady
from tests.integration.runs.test_degrees import degrees_of, same_update

pytestmark = [pytest.mark.nightly, pytest.mark.redis, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def wide(wide_node, divided_model):
    return Lab(wide_node, divided_model)


@pytest.mark.parametrize("schedule", [Schedule.SERIAL, Schedule.ROLLPLEX, Schedule.FUSED])
async def test_four_ranks_make_the_update_of_one(alone, wide, schedule):
    train_tp, rollout_tp = degrees_of(wide)
    if schedule is Schedule.FUSED and rollout_tp == 1:
        # Of two heads, each of four ranks has one.
        async with wide.node.client() as client:
            with pytest.raises(InvalidArgument, match=f'"fused" .* train_tp = {train_tp} '):
                await client.create_run(steady(wide.model, schedule))
        return
    await same_update(alone, wide, schedule)
