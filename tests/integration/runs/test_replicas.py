"""Several data-parallel replicas of every service make the update that one makes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from common.data.order import step_samples
from common.events.bodies import ModelRole
from common.governor.table import load_table
from common.ids import Service
from common.step.schedule import Schedule
from common.step.tasks import OWNER
from common.vlm.loading import empty_model, load_config, weight_layout
from common.worker.governor import TABLES_FOLDER
from common.worker.live_decode import BACKGROUND
from rollplex.models import RunState
from rollplex.verify.task import ROWS
from tests.integration.runs import task
from tests.integration.runs.deaths import assert_survives
from tests.integration.runs.lab import Finished, Lab, reach
from tests.integration.runs.moments import Striker
from tests.integration.runs.recipes import different, recipe, relative_difference
from tests.integration.runs.test_samples import named

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(600)]

STEPS = 2
PATIENCE = timedelta(seconds=400)
COUNTS = ("groups", "groups_dropped", "response_tokens", "prompt_tokens", "groups_without_gradient")
MEANS = ("reward_mean", "reward_std", "loss", "kl", "entropy", "gradient_norm")
PART_MIB = 1.0
"""Several parts of the optimizer's state in each replica."""
BLOWS = (
    (Striker.window, "rollout/1"),
    (Striker.encoder_accumulates, "prefix-encoder/0"),
    (Striker.updating, "learner/1"),
    (Striker.durable, "learner/0"),
)


@pytest.fixture(scope="module")
def replicated(replicated_node, model):
    return Lab(replicated_node, model)


def steady(lab: Lab, schedule: Schedule = Schedule.SERIAL, *, data: Any = None, **training: Any):
    """An update in which no gradient is small beside epsilon: AdamW makes a step of any other, be
    it rounding."""
    return recipe(
        lab.model,
        schedule,
        data=data or {},
        algorithm={"kl_coefficient": 0.01, "learning_rate": 1e-2, "eps": 1e-2},
        training={"steps": STEPS, **training},
    )


async def recorded(lab: Lab, groups: int, **options: Any) -> Finished:
    """One replica's run, and what it sampled."""
    wanted = steady(lab, prompts_per_step=groups, record_responses=True, **options)
    (run,) = await lab.succeeded({f"one-{groups}-{len(options)}": wanted})
    return run


async def repeated(replicated: Lab, expected: Finished, schedule: Schedule, **options: Any):
    """A run of two replicas with the same responses, which makes the same update."""
    wanted = steady(replicated, schedule, replay_from=str(expected.folder), **options)
    (actual,) = await replicated.succeeded({f"{expected.folder.name}-{schedule}": wanted})
    assert relative_difference(expected.tensors, actual.tensors) <= 1e-5
    for one, two in zip(expected.steps, actual.steps, strict=True):
        for name in COUNTS:
            assert one["metrics"][name] == two["metrics"][name], name
        for name in MEANS:
            assert one["metrics"][name] == pytest.approx(two["metrics"][name], rel=1e-4), name
    return actual


@pytest.mark.parametrize(
    ("schedule", "groups"), [(Schedule.SERIAL, 5), (Schedule.ROLLPLEX, 5), (Schedule.FUSED, 5)]
)
async def test_two_replicas_make_the_update_of_one(lab, replicated, schedule, groups):
    """One has three groups of a step, the other two, some of them without a picture."""
    expected = await recorded(lab, groups)
    actual = await repeated(
        replicated, expected, schedule, prompts_per_step=groups, optimizer_part_mib=PART_MIB
    )
    done = {
        (line["group"], line["participant"])
        for line in actual.timeline
        if line["task"] in ("decode", "policy_prefix", "prefix_backward", "response_train")
    }
    assert {group for group, _ in done} == set(range(groups))
    assert all(name.endswith(f"/{group % 2}") for group, name in done)


async def test_jobs_take_turns_beside_the_decode_of_their_replica(lab, replicated):
    """And are measured by it."""
    options = {"prompts_per_step": 5, "optimizer_part_mib": PART_MIB}
    fused = await repeated(replicated, await recorded(lab, 5), Schedule.FUSED, **options)
    for replica in range(2):
        logs = [replicated.node.log(f"{service}-{replica}") for service in BACKGROUND]
        assert any("beside the decode" in log for log in logs)
    measured = fused.folder / TABLES_FOLDER
    for path in measured.glob("*.json"):
        service = Service(path.stem.removesuffix("-1"))
        assert {OWNER[entry.task] for entry in load_table(path).entries} == {service}
    if measured.exists():
        load_table(measured)


@pytest.mark.parametrize("schedule", [Schedule.SERIAL, Schedule.FUSED])
async def test_a_replica_may_have_no_group(lab, replicated, schedule):
    expected = await recorded(lab, 1)
    await repeated(replicated, expected, schedule, prompts_per_step=1)


async def test_a_replica_may_have_no_picture(lab, replicated):
    """The tower trains on the other one's."""
    samples = step_samples(seed=7, step=1, prompts_per_step=2, dataset_rows=ROWS)
    assert [sample % 4 == 3 for sample in samples] == [False, True]
    expected = await recorded(lab, 2)
    await repeated(replicated, expected, Schedule.ROLLPLEX, prompts_per_step=2)


async def test_dropped_groups_are_nobodys(lab, replicated):
    options = {
        "data": {
            "train": named(task.rows_with_bad_ones),
            "max_prompt_tokens": 256,
            "max_drop_fraction": 0.5,
        },
        "steps": 3,
    }
    expected = await recorded(lab, 4, **options)
    actual = await repeated(replicated, expected, Schedule.FUSED, prompts_per_step=4, **options)
    assert actual.run.samples_dropped == expected.run.samples_dropped == len(task.BAD_ROWS)


async def test_runs_go_on_with_other_replicas(lab, replicated):
    """From the files of one to two, and back; the next update needs all of their moments."""
    first = await recorded(lab, 4)
    checkpoint = max((first.folder / "checkpoints").glob("step-*"))
    on = {"steps": STEPS + 1, "prompts_per_step": 4}
    wanted = steady(lab, **on, record_responses=True)
    (expected,) = await lab.succeeded({"one-on": wanted}, resume_from=checkpoint)
    wanted = steady(replicated, **on, replay_from=str(expected.folder))
    (actual,) = await replicated.succeeded({"two-on": wanted}, resume_from=checkpoint)
    assert relative_difference(expected.tensors, actual.tensors) <= 1e-5
    checkpoint = max((actual.folder / "checkpoints").glob("step-*"))
    assert [path.name for path in sorted(checkpoint.rglob("*"))] == [
        path.name for path in sorted(max((expected.folder / "checkpoints").iterdir()).rglob("*"))
    ]
    wanted = steady(lab, **on | {"steps": STEPS + 2}, record_responses=True)
    (expected,) = await lab.succeeded({"one-further": wanted}, resume_from=checkpoint)
    wanted = steady(replicated, **on | {"steps": STEPS + 2}, replay_from=str(expected.folder))
    (actual,) = await replicated.succeeded({"two-further": wanted}, resume_from=checkpoint)
    assert relative_difference(expected.tensors, actual.tensors) <= 1e-5


async def test_evaluations_are_of_all_replicas(lab, replicated):
    data = {"train": "rollplex.verify.task:rows", "eval": "rollplex.verify.task:rows"}
    counted = []
    for one in (lab, replicated):
        wanted = steady(one, data=data, steps=1, eval_prompts=5)
        (run,) = await one.succeeded({"evaluated": wanted})
        evaluations = [step["metrics"] for step in run.steps if step["mode"] == "eval"]
        counted.append([(step["groups"], step["prompt_tokens"]) for step in evaluations])
        assert all("reward_mean" in step for step in evaluations)
    assert counted[0] == counted[1]
    assert [groups for groups, _ in counted[0]] == [5, 5]


async def test_every_replica_reads_the_weights_of_its_learner(replicated):
    wanted = steady(replicated, steps=50)
    async with replicated.node.client() as client:
        run = await client.create_run(wanted, run_dir=replicated.folder / "verified")
        await reach(client, run.run_id, RunState.RUNNING, steps=1)
        await client.pause(run.run_id)
        await reach(client, run.run_id, RunState.PAUSED)
        report = await client.verify_weights()
        await client.stop(run.run_id)
        assert (await client.wait_run(run.run_id)).state is RunState.STOPPED
    assert report.differences == ()
    policy = {one.consumer for one in report.read if one.role is ModelRole.POLICY}
    readers = (Service.LEARNER, Service.PREFIX_ENCODER, Service.ROLLOUT)
    assert policy == {f"{service}/{rank}" for service in readers for rank in range(2)}


async def test_each_replica_pushes_to_its_rollout(replicated):
    """Whose tokens are those of a rollout that shares its weights."""
    serial, apart = await replicated.succeeded(
        {
            f"sampled-{schedule}": steady(
                replicated, schedule, prompts_per_step=3, optimizer_part_mib=PART_MIB
            )
            for schedule in (Schedule.SERIAL, Schedule.DISAGGREGATED)
        }
    )
    assert different(serial.tensors, apart.tensors) == []
    assert apart.run.restarts == 0
    weights = empty_model(load_config(replicated.model), dtype=torch.float32)
    layout = weight_layout(weights, train_vision=True, dtype=torch.float32)
    for step in apart.steps:
        assert step["metrics"]["push_bytes"] == 2 * 4 * layout.trainable_elements
        assert step["metrics"]["push_s"] > 0


async def test_a_run_survives_the_death_of_a_rank_of_either_replica(replicated):
    wanted = steady(replicated, Schedule.ROLLPLEX, steps=60, prompts_per_step=2)
    await assert_survives(replicated, wanted, BLOWS, patience=PATIENCE)
