"""Several data-parallel replicas of every service make the update that one makes."""

from __future__ import annotations

from typing import Any

import pytest

from common.step.schedule import Schedule
from tests.integration.runs.lab import Lab
from tests.integration.runs.recipes import recipe, relative_difference

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(600)]

STEPS = 2


@pytest.fixture(scope="module")
def replicated(replicated_node, model):
    return Lab(replicated_node, model)


def steady(lab: Lab, schedule: Schedule = Schedule.SERIAL, **training: Any):
    """An update in which no gradient is small beside epsilon: AdamW makes a step of any other, be
    it rounding."""
    return recipe(
        lab.model,
        schedule,
        algorithm={"kl_coefficient": 0.01, "learning_rate": 1e-2, "eps": 1e-2},
        training={"steps": STEPS, **training},
    )


async def recorded(lab: Lab, groups: int):
    """One replica's run, and what it sampled."""
    wanted = steady(lab, prompts_per_step=groups, record_responses=True)
    (run,) = await lab.succeeded({f"one-{groups}": wanted})
    return run


async def same_update(lab: Lab, replicated: Lab, schedule: Schedule, groups: int):
    expected = await recorded(lab, groups)
    wanted = steady(
        replicated, schedule, prompts_per_step=groups, replay_from=str(expected.folder)
    )
    (actual,) = await replicated.succeeded({f"two-{schedule}-{groups}": wanted})
    assert relative_difference(expected.tensors, actual.tensors) <= 1e-5
    return expected, actual


async def test_two_replicas_make_the_update_of_one(lab, replicated):
    await same_update(lab, replicated, Schedule.SERIAL, 4)
