"""Every process dies at every moment of a run, in every schedule; the result stays bit for bit."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from common.step.schedule import Schedule
from rollplex.models import RunState
from tests.integration.runs.moments import MOMENTS, VICTIMS, Striker
from tests.integration.runs.recipes import different, final_tensors, recipe

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.nightly, pytest.mark.redis, pytest.mark.timeout(900)]

log = logging.getLogger(__name__)

STEPS = 60
PATIENCE = timedelta(seconds=120)

_calm: dict[Schedule, Path] = {}
"""Folder of the undisturbed run, by schedule."""


def wanted(model, schedule):
    return recipe(model, schedule, training={"steps": STEPS, "checkpoint_every_steps": 1})


@pytest.fixture
async def calm(mortal_node, model, schedule):
    if schedule not in _calm:
        folder = mortal_node.folder / f"calm-{schedule}"
        async with mortal_node.client() as client:
            run = await client.create_run(wanted(model, schedule), run_dir=folder)
            run = await client.wait_run(run.run_id)
        assert run.state is RunState.SUCCEEDED, run.reason
        _calm[schedule] = folder
    return _calm[schedule]


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("victim", VICTIMS)
async def test_the_result_is_that_of_an_undisturbed_run(mortal_node, model, calm, schedule, victim):
    folder = mortal_node.folder / f"{schedule}-{victim.replace('/', '-')}"
    async with mortal_node.client() as client:
        run = await client.create_run(wanted(model, schedule), run_dir=folder)
        async with Striker(mortal_node, client, run) as striker:
            ended = asyncio.create_task(client.wait_run(run.run_id, patience=PATIENCE))
            struck = []
            for moment in MOMENTS:
                struck.append(await moment(striker, victim))
                log.info("%s", struck[-1])
            run = await ended
    assert run.state is RunState.SUCCEEDED, run.reason
    assert len({blow.step for blow in struck}) == len(MOMENTS)
    assert different(final_tensors(calm), final_tensors(folder)) == []
