"""Steps whose gradient is not finite are counted in a row, whoever dies between them."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from common.step.schedule import Schedule
from rollplex.models import RunState
from tests.integration.runs import task
from tests.integration.runs.moments import Striker
from tests.integration.runs.recipes import recipe
from tests.integration.runs.test_samples import named

pytestmark = [pytest.mark.nightly, pytest.mark.redis, pytest.mark.timeout(600)]

LIMIT = 100
"""More steps than there are until the last blow."""
PATIENCE = timedelta(seconds=500)
BLOWS = (
    (Striker.window, "rollout/1"),
    (Striker.window, "learner/1"),
    (Striker.window, "prefix-encoder/0"),
)


async def test_the_row_goes_on_over_deaths(replicated_node, model):
    wanted = recipe(
        model,
        Schedule.SERIAL,
        reward={"functions": [{"function": named(task.overflowing_reward)}]},
        algorithm={"nonfinite_limit": LIMIT, "scale_by_std": False},
        training={"steps": 2 * LIMIT, "prompts_per_step": 2},
    )
    node = replicated_node
    async with node.client() as client:
        run = await client.create_run(wanted, run_dir=node.folder / "overflowing")
        async with Striker(node, client, run) as striker:
            ended = asyncio.create_task(client.wait_run(run.run_id, patience=PATIENCE))
            struck = [await moment(striker, victim) for moment, victim in BLOWS]
            run = await ended
    assert all(blow.step > 0 for blow in struck[1:])
    assert run.restarts >= len(BLOWS)
    assert run.state is RunState.FAILED
    assert f"in {LIMIT} steps in a row" in run.reason
    assert run.steps_done == LIMIT - 1
