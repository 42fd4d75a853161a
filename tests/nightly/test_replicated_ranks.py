"""Replicas of several tensor-parallel ranks make the update that one rank makes."""

from __future__ import annotations

from datetime import timedelta

import pytest

from common.step.schedule import Schedule
from tests.integration.runs.deaths import assert_survives
from tests.integration.runs.lab import Lab
from tests.integration.runs.moments import Striker
from tests.integration.runs.recipes import relative_difference
from tests.integration.runs.test_ranks import steady

pytestmark = [pytest.mark.nightly, pytest.mark.redis, pytest.mark.timeout(900)]

PATIENCE = timedelta(seconds=600)
GROUPS = 3
BLOWS = ((Striker.window, "rollout/3"), (Striker.updating, "learner/2"))


@pytest.fixture(scope="module")
def together(replicated_parallel_node, divided_model):
    return Lab(replicated_parallel_node, divided_model)


async def test_two_replicas_of_two_ranks_make_the_update_of_one_rank(alone, together):
    """And go on from the files of one."""
    wanted = steady(alone.model, Schedule.SERIAL, prompts_per_step=GROUPS, record_responses=True)
    (first,) = await alone.succeeded({"alone-first": wanted})
    replay = {"prompts_per_step": GROUPS, "replay_from": str(first.folder)}
    (second,) = await together.succeeded(
        {"second": steady(together.model, Schedule.SERIAL, **replay)}
    )
    assert relative_difference(first.tensors, second.tensors) <= 1e-5
    checkpoint = max((second.folder / "checkpoints").glob("step-*"))
    on = {"prompts_per_step": GROUPS, "steps": 3}
    wanted = steady(alone.model, Schedule.SERIAL, **on, record_responses=True)
    (third,) = await alone.succeeded({"alone-third": wanted}, resume_from=checkpoint)
    wanted = steady(together.model, Schedule.FUSED, **on, replay_from=str(third.folder))
    (fourth,) = await together.succeeded({"fourth": wanted}, resume_from=checkpoint)
    assert relative_difference(third.tensors, fourth.tensors) <= 1e-5


async def test_a_run_survives_the_death_of_a_rank_of_a_replica(together):
    wanted = steady(together.model, Schedule.ROLLPLEX, steps=8, prompts_per_step=GROUPS)
    await assert_survives(together, wanted, BLOWS, patience=PATIENCE)
