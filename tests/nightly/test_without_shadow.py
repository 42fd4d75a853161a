"""Without the host shadow a lost broker costs the steps since the newest checkpoint."""

from __future__ import annotations

import asyncio

import pytest

from common.step.schedule import Schedule
from rollplex.models import RunState
from tests.integration.runs.lab import Finished, Lab
from tests.integration.runs.moments import BROKER, LEARNER, Striker
from tests.integration.runs.recipes import different, recipe

pytestmark = [pytest.mark.nightly, pytest.mark.redis, pytest.mark.timeout(600)]

STEPS = 40
CHECKPOINT_EVERY = 4
TRAINING = {"steps": STEPS, "checkpoint_every_steps": CHECKPOINT_EVERY, "host_shadow": False}


async def test_steps_since_the_checkpoint_are_run_again(mortal_node, model):
    lab = Lab(mortal_node, model)
    wanted = recipe(model, Schedule.ROLLPLEX, training=TRAINING)
    async with mortal_node.client() as client:
        (calm,) = await lab.succeeded({"calm": wanted})
        folder = mortal_node.folder / "struck"
        run = await client.create_run(wanted, run_dir=folder)
        async with Striker(mortal_node, client, run) as striker:
            ended = asyncio.create_task(client.wait_run(run.run_id))
            lost = [await striker.window(BROKER), await striker.window(BROKER)]
            # The storages outlive the learner: its death costs nothing but the attempt.
            kept = await striker.begun(LEARNER)
            run = await ended
    assert run.state is RunState.SUCCEEDED, run.reason
    struck = Finished(run=run, folder=folder)
    indices = [step["step"] for step in struck.steps]
    assert sorted(set(indices)) == list(range(STEPS))
    again = {index for index in indices if indices.count(index) > 1}
    assert again == {
        index
        for blow in lost
        for index in range(blow.step - blow.step % CHECKPOINT_EVERY, blow.step)
    }
    assert kept.step not in again
    assert different(calm.tensors, struck.tensors) == []
