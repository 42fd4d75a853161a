"""A disaggregated run of two replicas whose pushes are broken off by deaths."""

from __future__ import annotations

from datetime import timedelta

import pytest

from common.step.schedule import Schedule
from tests.integration.runs.deaths import assert_survives
from tests.integration.runs.lab import Lab
from tests.integration.runs.moments import Striker
from tests.integration.runs.recipes import recipe

pytestmark = [pytest.mark.nightly, pytest.mark.redis, pytest.mark.timeout(600)]

PATIENCE = timedelta(seconds=500)
STEPS = 40
BUCKET_MIB = 0.01
"""Of the weights, which have about a hundred buckets so."""
BLOWS = (
    (Striker.window, "rollout/1"),
    (Striker.pushing, "learner/1"),
    (Striker.pushing, "rollout/1"),
    (Striker.pushed, "learner/0"),
    (Striker.pushed, "rollout/0"),
    (Striker.durable, "learner/1"),
)


async def test_a_run_survives_deaths_around_the_pushes_of_either_replica(replicated_node, model):
    training = {"steps": STEPS, "prompts_per_step": 2, "push_bucket_mib": BUCKET_MIB}
    wanted = recipe(model, Schedule.DISAGGREGATED, training=training)
    lab = Lab(replicated_node, model)
    await assert_survives(lab, wanted, BLOWS, patience=PATIENCE)
