"""Samples that cannot be used, and rewards that fail: dropped, replaced or fatal, and counted."""

from __future__ import annotations

import pytest

from rollplex.models import RunState
from tests.integration.runs import task
from tests.integration.runs.recipes import recipe

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(240)]


def named(function) -> str:
    return f"{function.__module__}:{function.__name__}"


def rewarded_by(function, **policy) -> dict:
    return {"functions": [{"function": named(function)}], **policy}


async def test_bad_samples_are_dropped_and_counted(lab):
    data = {
        "train": named(task.rows_with_bad_ones),
        "max_prompt_tokens": 256,
        "max_drop_fraction": 0.5,
    }
    few = {"steps": 3, "prompts_per_step": 4}
    (finished,) = await lab.succeeded({"bad": recipe(lab.model, data=data, training=few)})
    assert finished.run.samples_dropped == len(task.BAD_ROWS)
    dropped = sum(step["metrics"]["groups_dropped"] for step in finished.steps)
    living = sum(step["metrics"]["groups"] for step in finished.steps)
    assert (dropped, living) == (3, 9)


async def test_too_many_bad_samples_end_the_run(lab):
    data = {"train": named(task.rows_with_bad_ones), "max_prompt_tokens": 256}
    (finished,) = await lab.finished({"too-bad": recipe(lab.model, data=data)})
    assert finished.run.state is RunState.FAILED
    assert "data.max_drop_fraction = 0.1" in finished.run.reason


async def test_groups_with_failed_rewards_are_dropped(lab):
    reward = rewarded_by(task.misbehaving_reward, time_limit_s=0.5)
    (finished,) = await lab.succeeded(
        {
            "drop": recipe(
                lab.model,
                reward=reward,
                data={"max_drop_fraction": 1.0},
                training={"steps": 1, "prompts_per_step": 8},
            )
        }
    )
    metrics = finished.steps[0]["metrics"]
    assert metrics["groups"] + metrics["groups_dropped"] == 8
    assert metrics["groups_dropped"] == finished.run.samples_dropped > 0
    assert metrics["reward_failures"] == 0
    assert metrics["update_applied"] == 1


async def test_failed_rewards_count_as_the_default(lab):
    reward = rewarded_by(task.raising_reward, on_error="default", default_value=0.25)
    (finished,) = await lab.succeeded(
        {"default": recipe(lab.model, reward=reward, training={"steps": 6, "prompts_per_step": 4})}
    )
    # The 24 rows are seen once: one group of two responses has failed.
    assert sum(step["metrics"]["reward_failures"] for step in finished.steps) == 2
    assert finished.run.samples_dropped == 0


async def test_a_failed_reward_stops_the_run(lab):
    reward = rewarded_by(task.raising_reward, on_error="stop")
    (finished,) = await lab.finished(
        {"stop": recipe(lab.model, reward=reward, training={"steps": 6, "prompts_per_step": 4})}
    )
    assert finished.run.state is RunState.FAILED
    assert named(task.raising_reward) in finished.run.reason
    assert "this row cannot be rewarded" in finished.run.reason
