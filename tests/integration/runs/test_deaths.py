"""Every process of a node is killed once in one run, which has to end as if nothing had been."""

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from common.step.schedule import Schedule
from rollplex.models import RunState
from tests.integration.runs.lab import Lab
from tests.integration.runs.moments import (
    BROKER,
    CONTROLLER,
    ENCODER,
    LEARNER,
    REDIS,
    REFERENCE,
    ROLLOUT,
    VICTIMS,
    Striker,
)
from tests.integration.runs.node import gone, send
from tests.integration.runs.recipes import different, final_tensors, recipe

pytestmark = [pytest.mark.slow, pytest.mark.redis]

STEPS = 30
HANGS_S = 5.0
PART_MIB = 0.08
"""Of the optimizer's state of the tiny model, which has about thirty parts so."""
BUCKET_MIB = 0.01
"""Of its weights in a push, which has about a hundred buckets so."""
PATIENCE = timedelta(seconds=90)
BLOWS = (
    (Striker.window, BROKER),
    (Striker.begun, CONTROLLER),
    (Striker.updating, REDIS),
    (Striker.window, ROLLOUT),
    (Striker.encoder_accumulates, ENCODER),
    (Striker.scoring, REFERENCE),
    (Striker.durable, LEARNER),
    (Striker.updating, BROKER),
)


@pytest.fixture(scope="module")
def mortal_lab(mortal_node, model):
    return Lab(mortal_node, model)


@asynccontextmanager
async def disturbed(lab, name, **training):
    """A run to be struck; at the end it has to equal the undisturbed one, bit for bit."""
    undisturbed = recipe(lab.model, training={"steps": STEPS})
    wanted = recipe(lab.model, training={"steps": STEPS, **training})
    async with lab.node.client() as client:
        (calm,) = await lab.succeeded({"calm": undisturbed})
        run = await client.create_run(wanted, run_dir=lab.folder / name)
        async with Striker(lab.node, client, run) as striker:
            ended = asyncio.create_task(client.wait_run(run.run_id, patience=PATIENCE))
            yield striker
            run = await ended
    assert run.state is RunState.SUCCEEDED, run.reason
    assert run.steps_done == STEPS
    assert run.restarts >= 1
    assert different(calm.tensors, final_tensors(Path(run.run_dir))) == []


@pytest.mark.timeout(400)
async def test_a_run_survives_the_death_of_every_process(mortal_lab):
    async with disturbed(mortal_lab, "killed") as striker:
        struck = [await moment(striker, victim) for moment, victim in BLOWS]
    assert len({blow.step for blow in struck}) == len(BLOWS)
    assert {blow.victim for blow in struck} == set(VICTIMS)


@pytest.mark.timeout(300)
async def test_a_run_survives_deaths_while_its_optimizer_is_spilled(mortal_lab):
    async with disturbed(mortal_lab, "spilled", spill_optimizer=True) as striker:
        struck = [
            await moment(striker, victim)
            for moment, victim in (
                (Striker.spilled, LEARNER),
                (Striker.spilled, BROKER),
                (Striker.updating, LEARNER),
                (Striker.spilled, ENCODER),
            )
        ]
    assert len({blow.step for blow in struck}) == len(struck)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("spills", [True, False], ids=["spilled", "kept"])
async def test_a_run_survives_deaths_between_two_parts_of_an_update(mortal_lab, spills):
    parts = {"spill_optimizer": spills, "optimizer_part_mib": PART_MIB}
    async with disturbed(mortal_lab, f"between-parts-{spills}", **parts) as striker:
        struck = [
            await moment(striker, victim)
            for moment, victim in (
                (Striker.between_parts, LEARNER),
                (Striker.durable, LEARNER),
                (Striker.between_parts, BROKER),
                (Striker.between_parts, LEARNER),
            )
        ]
    assert len({blow.step for blow in struck}) == len(struck)


@pytest.mark.timeout(300)
async def test_a_run_survives_deaths_while_its_reference_is_spilled(mortal_lab):
    """With `serial`, where nothing reads the reference's weights while sequences decode."""
    serial = {"schedule": Schedule.SERIAL, "spill_reference": True}
    away = partial(Striker.spilled, storage="reference.weights")
    async with disturbed(mortal_lab, "reference-spilled", **serial) as striker:
        struck = [
            await moment(striker, victim)
            for moment, victim in (
                (away, REFERENCE),
                (Striker.scoring, REFERENCE),
                (away, ENCODER),
                (Striker.scoring, ENCODER),
                (away, BROKER),
            )
        ]
    assert len({blow.step for blow in struck}) == len(struck)


@pytest.mark.timeout(400)
async def test_a_disaggregated_run_survives_deaths_around_its_pushes(mortal_lab):
    apart = {
        "schedule": Schedule.DISAGGREGATED,
        "optimizer_part_mib": PART_MIB,
        "push_bucket_mib": BUCKET_MIB,
    }
    async with disturbed(mortal_lab, "disaggregated", **apart) as striker:
        struck = [
            await moment(striker, victim)
            for moment, victim in (
                (Striker.window, ROLLOUT),
                (Striker.configuring, LEARNER),
                (Striker.configuring, ROLLOUT),
                (Striker.pushing, LEARNER),
                (Striker.pushing, ROLLOUT),
                (Striker.pushed, LEARNER),
                (Striker.pushed, ROLLOUT),
                (Striker.durable, LEARNER),
            )
        ]
    assert len({blow.step for blow in struck}) == len(struck)


@pytest.mark.timeout(180)
async def test_services_that_are_asked_to_end_abandon_the_step(mortal_lab):
    """The rollout is held still in the window, so that the others wait for it, for ever."""
    node = mortal_lab.node
    async with disturbed(mortal_lab, "terminated") as striker, striker.window_held():
        asked = {name: node.pid(name) for name in (ENCODER, LEARNER)}
        for pid in asked.values():
            send(pid, signal.SIGTERM)
        assert not await gone(set(asked.values()), within_s=node.deployment.deadlines.drain_s)
    for name in asked:
        assert "cut off" not in node.log(name)


@pytest.mark.timeout(180)
async def test_a_service_that_hangs_costs_an_attempt(mortal_lab):
    hung = disturbed(mortal_lab, "hung", step_deadline_s=HANGS_S)
    async with hung as striker, striker.window_held():
        await striker.aborted()
