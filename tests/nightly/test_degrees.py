"""Ranks and replicas of many numbers on either side make the update of one."""

from __future__ import annotations

from datetime import timedelta

import pytest

from common.errors import InvalidArgument
from common.ids import Service
from common.step.schedule import Schedule
from tests.integration.runs.deaths import assert_survives
from tests.integration.runs.lab import Lab
from tests.integration.runs.moments import Striker
from tests.integration.runs.recipes import steady
from tests.integration.runs.test_degrees import degrees_of, same_responses, same_update

PATIENCE = timedelta(seconds=600)
pytestmark = [pytest.mark.nightly, pytest.mark.redis, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def wide(wide_node, divided_model):
    return Lab(wide_node, divided_model)


@pytest.mark.parametrize("schedule", [Schedule.SERIAL, Schedule.ROLLPLEX, Schedule.FUSED])
async def test_all_ranks_make_the_update_of_one(alone, wide, schedule):
    train_tp, rollout_tp = degrees_of(wide)
    if schedule is Schedule.FUSED and rollout_tp == 1 < train_tp:
        # Of two heads, each of four ranks has one.
        async with wide.node.client() as client:
            with pytest.raises(InvalidArgument, match=f'"fused" .* train_tp = {train_tp} '):
                await client.create_run(steady(wide.model, schedule))
        return
    await same_update(alone, wide, schedule)


async def test_every_replica_samples_what_one_rank_samples(alone, wide):
    await same_responses(alone, wide)


async def test_a_run_survives_deaths_while_groups_of_several_engines_train(wide):
    """In an order that no event's time has a part in: the bits are the same."""
    train_tp, rollout_tp = degrees_of(wide)
    fused = rollout_tp >= train_tp
    engine, learner = (
        wide.node.deployment.ranks(service) - 1 for service in (Service.ROLLOUT, Service.LEARNER)
    )
    wanted = steady(
        wide.model, Schedule.FUSED if fused else Schedule.ROLLPLEX, steps=8, prompts_per_step=5
    )
    blows = (
        (Striker.window, f"rollout/{engine}"),
        (Striker.learner_accumulates, f"learner/{learner}"),
    )
    await assert_survives(wide, wanted, blows, patience=PATIENCE)
