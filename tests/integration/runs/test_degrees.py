"""Training at one tensor-parallel degree and rollout at another, of other replicas, make the update
of one rank."""

from __future__ import annotations

import pytest
from safetensors.numpy import load_file

from common.errors import InvalidArgument
from common.events.bodies import ModelRole
from common.ids import Service
from common.layouts.node import node_plan, rollout_sharing, training_sharing
from common.step.schedule import Schedule
from common.vlm.shape import read_shape
from rollplex.models import RunState
from tests.integration.runs.deaths import assert_survives
from tests.integration.runs.lab import Lab, reach
from tests.integration.runs.moments import Striker
from tests.integration.runs.recipes import (
    recorded,
    relative_difference,
    steady,
)

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(600)]

CLOSE = 1e-5
FLOAT32_BYTES = 4
WEIGHTS = {"policy.weights", "rollout.weights"}
STORAGE_SLACK_BYTES = 8 << 10
"""Of a storage: padding of its tensors, and the rest of its last page."""


@pytest.fixture(scope="module")
def unequal(unequal_node, divided_model):
    return Lab(unequal_node, divided_model)


@pytest.fixture(scope="module")
def degrees(unequal):
    return degrees_of(unequal)


def degrees_of(lab):
    """Of training and of the rollout."""
    return lab.node.deployment.train_tp, lab.node.deployment.rollout_tp


def sharing_of(lab):
    """What the plan says of all ranks of training, and of all of the rollout."""
    partners, (train_tp, rollout_tp) = lab.node.deployment.partners, degrees_of(lab)
    train, rollout = (partners.replica_count(one) for one in (Service.LEARNER, Service.ROLLOUT))
    plan = node_plan(
        read_shape(str(lab.model)),
        train_tp=train_tp,
        rollout_tp=rollout_tp,
        element_bytes=FLOAT32_BYTES,
        train_replicas=train,
        rollout_replicas=rollout,
    )
    training = [
        training_sharing(plan, rank, replica=replica)
        for replica in range(train)
        for rank in range(train_tp)
    ]
    rolling_out = [
        rollout_sharing(plan, rank, replica=replica)
        for replica in range(rollout)
        for rank in range(rollout_tp)
    ]
    return training, rolling_out


def planned_bytes(lab):
    """Of all ranks of the rollout together."""
    _, ranks = sharing_of(lab)
    return {
        "weights_alias_bytes": sum(one.alias_bytes for one in ranks),
        "weights_gather_bytes": sum(one.gather_bytes for one in ranks),
        "weights_rebuild_bytes": sum(one.rebuild_copied_bytes for one in ranks),
    }


def weights_bytes(lab):
    """All memory of the policy's weights: training's shards, and what is gathered and rebuilt."""
    training, ranks = sharing_of(lab)
    gathered = sum(one.gather_bytes for one in ranks)
    assert gathered == sum(one.gap_bytes for one in training)
    rebuilt = sum(one.rebuild_bytes for one in ranks)
    return sum(one.train_bytes for one in training) + gathered + rebuilt


async def same_update(alone, unequal, schedule):
    """The update of one rank on the same responses, and what was copied for it."""
    expected = await recorded(alone)
    wanted = steady(unequal.model, schedule, replay_from=str(expected.folder))
    (actual,) = await unequal.succeeded({f"unequal-{schedule}": wanted})
    assert relative_difference(expected.tensors, actual.tensors) <= CLOSE
    train_tp, rollout_tp = degrees_of(unequal)
    for step in actual.steps:
        metrics = step["metrics"]
        # of the rollout's ranks and training's: the second step's are of updated weights
        assert metrics["mismatch_abs_max"] <= CLOSE
        if len(set(degrees_of(unequal))) == 1:
            assert "weights_alias_bytes" not in metrics
            continue
        planned = planned_bytes(unequal)
        assert {key: metrics[key] for key in planned} == planned
        assert (planned["weights_gather_bytes"] > 0) == (train_tp > rollout_tp)
        assert metrics["time_weights_refresh_s"] > 0


@pytest.mark.parametrize("schedule", [Schedule.SERIAL, Schedule.ROLLPLEX])
async def test_unequal_ranks_make_the_update_of_one(alone, unequal, schedule):
    await same_update(alone, unequal, schedule)


async def test_fused_runs_where_key_value_heads_nest_and_is_refused_elsewhere(
    alone, unequal, degrees
):
    train_tp, rollout_tp = degrees
    if train_tp < rollout_tp:
        await same_update(alone, unequal, Schedule.FUSED)
        return
    here = f'"fused" on a node with train_tp = {train_tp} and rollout_tp = {rollout_tp}'
    async with unequal.node.client() as client:
        with pytest.raises(InvalidArgument, match=here):
            await client.create_run(steady(unequal.model, Schedule.FUSED))


async def test_every_replica_samples_the_same_responses(alone, unequal):
    await same_responses(alone, unequal)


async def same_responses(alone, unequal):
    """Those that one rank samples, each group's where it is bound to."""
    expected = await recorded(alone)
    wanted = steady(unequal.model, Schedule.SERIAL, steps=1, record_responses=True)
    (actual,) = await unequal.succeeded({"sampled": wanted})
    one, several = (
        {
            name: tensor.tolist()
            for path in (run.folder / "responses").glob("step-00000000*")
            for name, tensor in load_file(path).items()
        }
        for run in (expected, actual)
    )
    assert several == one
    done = [line for line in actual.timeline if line["task"] == "decode"]
    partners = unequal.node.deployment.partners
    assert {(line["group"], line["participant"]) for line in done} == {
        (group, str(partners.all(Service.ROLLOUT, replica=replica)[0]))
        for group in range(4)
        for replica in [partners.bound(group, Service.ROLLOUT)]
    }


async def test_a_replica_of_either_side_may_have_no_group(alone, unequal):
    expected = await recorded(alone, groups=1)
    wanted = steady(
        unequal.model,
        Schedule.ROLLPLEX,
        data={"eval": "rollplex.verify.task:rows"},
        prompts_per_step=1,
        eval_prompts=3,
        replay_from=str(expected.folder),
    )
    (actual,) = await unequal.succeeded({"one-group": wanted})
    assert relative_difference(expected.tensors, actual.tensors) <= CLOSE
    groups = [(step["mode"], step["metrics"]["groups"]) for step in actual.steps]
    assert groups == [("eval", 3), ("train", 1), ("train", 1), ("eval", 3)]


async def test_ranks_of_both_degrees_read_the_same_weights(unequal):
    wanted = steady(unequal.model, Schedule.SERIAL, steps=50)
    async with unequal.node.client() as client:
        run = await client.create_run(wanted, run_dir=unequal.folder / "verified")
        await reach(client, run.run_id, RunState.RUNNING, steps=1)
        await client.pause(run.run_id)
        await reach(client, run.run_id, RunState.PAUSED)
        report = await client.verify_weights()
        ledger = await client.ledger()
        await client.resume(run.run_id)
        await reach(client, run.run_id, RunState.RUNNING, steps=report.read[0].version + 1)
        await client.stop(run.run_id)
        assert (await client.wait_run(run.run_id)).state is RunState.STOPPED
    taken = sum(one.size_bytes for one in ledger.entries if one.name.partition("/")[0] in WEIGHTS)
    planned, services = weights_bytes(unequal), (Service.LEARNER, Service.ROLLOUT)
    storages = sum(unequal.node.deployment.ranks(one) for one in services)
    assert planned <= taken <= planned + storages * STORAGE_SLACK_BYTES
    assert report.differences == ()
    policy = {one.consumer: one.checksums for one in report.read if one.role is ModelRole.POLICY}
    readers = (Service.LEARNER, Service.PREFIX_ENCODER, Service.ROLLOUT)
    ranks = {service: unequal.node.deployment.ranks(service) for service in readers}
    assert policy.keys() == {f"{name}/{r}" for name, count in ranks.items() for r in range(count)}
    pieces = {
        service: {key for rank in range(count) for key in policy[f"{service}/{rank}"]}
        for service, count in ranks.items()
    }
    assert pieces[Service.LEARNER] == pieces[Service.PREFIX_ENCODER] == pieces[Service.ROLLOUT]


async def test_a_run_survives_the_death_of_any_rank(unequal):
    last = {service: unequal.node.deployment.ranks(service) - 1 for service in Service}
    blows = [
        (Striker.window, f"rollout/{last[Service.ROLLOUT]}"),
        (Striker.learner_accumulates, f"learner/{last[Service.LEARNER]}"),
        (Striker.updating, f"learner/{last[Service.LEARNER]}"),
        (Striker.durable, "learner/0"),
    ]
    if unequal.node.deployment.dp == 1:
        # One prefix-encoder can be held for it, not those of several replicas.
        blows.append((Striker.begun, "rollout/0"))
    wanted = steady(unequal.model, Schedule.ROLLPLEX, steps=20)
    await assert_survives(unequal, wanted, blows)
