"""A rollout with weights of its own: what it shares, what is pushed to it, what it evaluates."""

from __future__ import annotations

import pytest
import torch

from common.step.schedule import Schedule
from common.vlm.loading import empty_model, load_config, weight_layout
from rollplex.models import RunState
from tests.integration.runs.lab import reach
from tests.integration.runs.recipes import different, recipe

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(240)]

EVALUATED = {
    "data": {"eval": "rollplex.verify.task:rows"},
    "training": {"steps": 2, "eval_every_steps": 1, "eval_prompts": 3},
}
READERS = {"learner/0", "prefix-encoder/0"}


async def test_it_shares_no_weights_and_has_the_same(node, model):
    wanted = recipe(model, Schedule.DISAGGREGATED, training={"steps": 50})
    async with node.client() as client, node.broker() as broker:
        run = await client.create_run(wanted, run_dir=node.folder / "apart")
        await reach(client, run.run_id, RunState.RUNNING, steps=1)
        await client.pause(run.run_id)
        paused = await reach(client, run.run_id, RunState.PAUSED)
        report = await client.verify_weights()
        entries = {entry.name: entry for entry in await node.entries(broker, run.run_id)}
        await client.stop(run.run_id)
        await client.wait_run(run.run_id)
    policy = {one.consumer: one for one in report.read if one.role == "policy"}
    assert policy.keys() == READERS | {"rollout/0"}
    assert {one.version for one in policy.values()} == {paused.steps_done}
    assert report.differences == ()
    assert paused.restarts == 0
    version = f"readable(v{paused.steps_done})"
    for name in ("policy.weights", "rollout.weights"):
        assert entries[name].state.startswith(version), name


async def test_evaluations_and_pushes(lab):
    serial, apart = await lab.succeeded(
        {
            f"evaluated-{schedule}": recipe(lab.model, schedule, **EVALUATED)
            for schedule in (Schedule.SERIAL, Schedule.DISAGGREGATED)
        }
    )
    assert (serial.run.restarts, apart.run.restarts) == (0, 0)
    assert different(serial.tensors, apart.tensors) == []
    rewards = [
        [step["metrics"]["reward_mean"] for step in run.steps if step["mode"] == "eval"]
        for run in (serial, apart)
    ]
    assert len(rewards[0]) == 3
    assert rewards[0] == rewards[1]
    model = empty_model(load_config(lab.model), dtype=torch.float32)
    layout = weight_layout(model, train_vision=True, dtype=torch.float32)
    trained = [step["metrics"] for step in apart.steps if step["mode"] == "train"]
    assert [one["push_bytes"] for one in trained] == [4.0 * layout.trainable_elements] * 2
    assert all(one["push_s"] > 0 and one["push_wait_s"] >= 0 for one in trained)
    assert not any("push_bytes" in step["metrics"] for step in serial.steps)
