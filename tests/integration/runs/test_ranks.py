"""Several tensor-parallel ranks of every service make the update that one rank makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.errors import RollplexError
from common.events.bodies import ModelRole
from common.ids import Service
from common.step.schedule import Schedule
from common.vlm.loading import empty_model, load_config, weight_layout
from common.vlm.parallel.model import config_shape
from common.vlm.parallel.shards import rank_layout, shards
from rollplex.models import RunState
from tests.integration.runs.deaths import assert_survives
from tests.integration.runs.lab import Lab, reach
from tests.integration.runs.moments import Striker
from tests.integration.runs.recipes import (
    STEPS,
    checkpoint_tensors,
    recorded,
    relative_difference,
    steady,
)

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(600)]

BLOWS = (
    (Striker.window, "rollout/1"),
    (Striker.encoder_accumulates, "prefix-encoder/1"),
    (Striker.scoring, "reference/1"),
    (Striker.updating, "learner/1"),
    (Striker.durable, "learner/0"),
)
READERS = {
    ModelRole.POLICY: (Service.LEARNER, Service.PREFIX_ENCODER, Service.ROLLOUT),
    ModelRole.REFERENCE: (Service.REFERENCE, Service.PREFIX_ENCODER),
}


@pytest.fixture(scope="module")
def together(parallel_node, divided_model):
    return Lab(parallel_node, divided_model)


@pytest.mark.parametrize("schedule", list(Schedule))
async def test_two_ranks_make_the_update_of_one(alone, together, schedule):
    expected = await recorded(alone)
    wanted = steady(together.model, schedule, replay_from=str(expected.folder))
    (actual,) = await together.succeeded({f"together-{schedule}": wanted})
    assert relative_difference(expected.tensors, actual.tensors) <= 1e-5


async def test_the_pushes_of_all_ranks_are_counted(alone, together):
    expected = await recorded(alone)
    schedule = Schedule.DISAGGREGATED
    wanted = steady(together.model, schedule, replay_from=str(expected.folder))
    (actual,) = await together.succeeded({f"together-{schedule}": wanted})
    config = load_config(together.model)
    whole = weight_layout(
        empty_model(config, dtype=torch.float32), train_vision=True, dtype=torch.float32
    )
    elements = 0
    for rank in range(2):
        parts = shards(whole, config_shape(config), rank=rank, degree=2)
        elements += rank_layout(whole, parts, rank=rank, degree=2).trainable_elements
    assert [step["metrics"]["push_bytes"] for step in actual.steps] == [4.0 * elements] * STEPS


async def test_two_ranks_go_on_from_the_checkpoint_of_one(alone, together):
    """Its moments have parts in both ranks: the third step's update needs them."""
    first = await recorded(alone)
    checkpoint = max((first.folder / "checkpoints").glob("step-*"))
    on = {"steps": STEPS + 1}
    wanted = steady(alone.model, Schedule.SERIAL, **on, record_responses=True)
    (expected,) = await alone.succeeded({"alone-on": wanted}, resume_from=checkpoint)
    wanted = steady(alone.model, Schedule.SERIAL, **on, replay_from=str(expected.folder))
    (actual,) = await together.succeeded({"together-on": wanted}, resume_from=checkpoint)
    assert relative_difference(expected.tensors, actual.tensors) <= 1e-5


async def test_a_run_survives_the_death_of_single_ranks(together):
    wanted = steady(together.model, Schedule.ROLLPLEX, steps=20)
    await assert_survives(together, wanted, BLOWS)


async def test_a_checkpoint_that_fails_on_one_rank_does_not_part_the_ranks(together):
    """The other rank waits for it in a gather; the next checkpoint is of both again."""
    wanted = steady(together.model, Schedule.SERIAL, steps=50)
    async with together.node.client() as client:
        run = await client.create_run(wanted, run_dir=together.folder / "full")
        await reach(client, run.run_id, RunState.RUNNING, steps=1)
        await client.pause(run.run_id)
        await reach(client, run.run_id, RunState.PAUSED)
        in_the_way = Path(run.run_dir) / "checkpoints"
        in_the_way.touch()
        with pytest.raises(RollplexError, match=r"checkpoint of learner/0: .*NotADirectory"):
            await client.save_checkpoint(run.run_id)
        in_the_way.unlink()
        saved = await client.save_checkpoint(run.run_id)
        assert checkpoint_tensors(Path(saved.path))
        await client.stop(run.run_id)
        assert (await client.wait_run(run.run_id)).state is RunState.STOPPED


async def test_every_rank_reads_the_weights_of_its_owner(together):
    wanted = steady(together.model, Schedule.SERIAL, steps=50)
    async with together.node.client() as client:
        run = await client.create_run(wanted, run_dir=together.folder / "verified")
        await reach(client, run.run_id, RunState.RUNNING, steps=1)
        await client.pause(run.run_id)
        await reach(client, run.run_id, RunState.PAUSED)
        report = await client.verify_weights()
        await client.stop(run.run_id)
        assert (await client.wait_run(run.run_id)).state is RunState.STOPPED
    assert report.differences == ()
    read = {(one.role, one.consumer) for one in report.read}
    assert read == {
        (role, f"{service}/{rank}")
        for role, services in READERS.items()
        for service in services
        for rank in range(2)
    }
