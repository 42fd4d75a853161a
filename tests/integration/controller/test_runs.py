"""Runs of a real controller process, from queue to end."""

from __future__ import annotations

import asyncio
import json
import signal

import pytest

from common.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from common.events import bodies
from common.ids import Service
from common.step.plan import StepMode
from rollplex import Client, Run, RunState
from services.controller.files import read_steps
from tests.integration.controller.conftest import recipe
from tests.integration.controller.peers import BROKER

pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]


async def _until(condition, *, seconds=20.0) -> None:
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.02)


async def _ended(client: Client, run_id: str) -> Run:
    async with asyncio.timeout(30):
        return await client.wait_run(run_id)


async def test_two_runs_one_after_the_other(controller, node, queue_run, tmp_path):
    first, second = await queue_run(), await queue_run(steps=1)
    controller.start()
    async with await controller.client() as client:
        async with asyncio.timeout(30):
            updates = [update async for update in client.watch_run(first)]
        assert updates[-1].run.state is RunState.SUCCEEDED
        assert updates[-1].run.steps_done == 3
        assert updates[-1].run.eval_reward_before == 1.0
        assert updates[-1].run.eval_reward_after == 1.0
        run = await _ended(client, second)
        assert (run.state, run.steps_done) == (RunState.SUCCEEDED, 1)
        assert [r.run_id for r in await client.list_runs()] == [first, second]
    plans = [p for p in node.broker.plans if p.run_id == first]
    assert [(p.mode.value, p.weights_version) for p in plans] == [
        ("eval", 0),
        ("train", 0),
        ("train", 1),
        ("train", 2),
        ("eval", 3),
    ]
    assert node.broker.closed == [first, second]
    steps = read_steps(tmp_path / "run-1")
    assert [(s.mode, s.step) for s in steps] == [(p.mode, p.step) for p in plans]
    timeline = [json.loads(x) for x in (tmp_path / "run-1/timeline.jsonl").read_text().splitlines()]
    assert [line["task"] for line in timeline] == ["update"] * 3
    assert all(worker.released == [first, second] for worker in node.workers.values())


async def test_kill_9_in_the_middle_of_a_step(controller, node, queue_run):
    run_id = await queue_run()
    node.hold = {1}
    controller.start()
    client = await controller.client()
    watcher = asyncio.create_task(_ended(client, run_id))
    await _until(lambda: node.broker.plans and node.broker.plans[-1].step == 1)
    interrupted = node.broker.plans[-1]
    controller.end(signal.SIGKILL)
    node.hold.clear()
    controller.start()
    run = await watcher
    await client.close()
    assert run.state is RunState.SUCCEEDED
    again = [p for p in node.broker.plans if p.step == 1 and p.mode is StepMode.TRAIN]
    assert [p.epoch > interrupted.epoch for p in again] == [False, True]
    assert again[0].groups == again[1].groups
    # The workers were told that the old epoch is over before they were configured again.
    assert (interrupted.epoch, "begun again") in node.broker.aborts
    trained = [p.step for p in node.broker.plans if p.mode is StepMode.TRAIN]
    assert trained == [0, 1, 1, 2]


async def test_an_update_that_nobody_heard_of_is_not_made_twice(
    controller, node, queue_run, tmp_path
):
    run_id = await queue_run()
    node.hold = {1}
    controller.start()
    client = await controller.client()
    await _until(lambda: node.broker.plans and node.broker.plans[-1].step == 1)
    controller.end(signal.SIGKILL)
    node.hold.clear()
    # The learner finishes while no controller listens.
    node.versions[run_id] = 2
    controller.start()
    run = await _ended(client, run_id)
    await client.close()
    assert run.state is RunState.SUCCEEDED
    trained = [p.step for p in node.broker.plans if p.mode is StepMode.TRAIN]
    assert trained == [0, 1, 2]
    steps = [s for s in read_steps(tmp_path / "run-1") if s.mode is StepMode.TRAIN]
    assert [s.step for s in steps] == [0, 1, 2]
    assert steps[1].metrics["adopted"] == 1.0


async def test_durable_state_that_went_back_is_run_again(controller, node, queue_run, tmp_path):
    run_id = await queue_run()
    node.hold = {2}
    controller.start()
    client = await controller.client()
    await _until(lambda: node.broker.plans and node.broker.plans[-1].step == 2)
    node.versions[run_id] = 1
    node.kill(Service.LEARNER)
    node.hold.clear()
    run = await _ended(client, run_id)
    assert run.state is RunState.SUCCEEDED
    assert run.restarts == 1
    await client.close()
    trained = [p.step for p in node.broker.plans if p.mode is StepMode.TRAIN]
    assert trained == [0, 1, 2, 1, 2]


@pytest.mark.parametrize("failure", ["death", "broker"])
async def test_a_loss_in_a_step_begins_it_again(controller, node, queue_run, failure):
    run_id = await queue_run()
    node.hold = {0}
    controller.start()
    client = await controller.client()
    await _until(lambda: node.broker.plans and node.broker.plans[-1].mode is StepMode.TRAIN)
    node.hold.clear()
    if failure == "death":
        node.kill(Service.ROLLOUT)
    else:
        await node.restart_broker()
    run = await _ended(client, run_id)
    await client.close()
    assert run.state is RunState.SUCCEEDED
    assert run.restarts == 1


async def test_redis_away_in_a_step_loses_nothing(controller, node, queue_run, redis_server):
    run_id = await queue_run()
    node.hold = {1}
    controller.start()
    client = await controller.client()
    await _until(lambda: node.broker.plans and node.broker.plans[-1].step == 1)
    redis_server.stop(signal.SIGKILL)
    node.release_step()
    await asyncio.sleep(0.5)
    seen = await client.get_run(run_id)
    # The step is done but not on disk, so nobody is told of it.
    assert seen.steps_done == 1
    await redis_server.start()
    run = await _ended(client, run_id)
    await client.close()
    assert run.state is RunState.SUCCEEDED
    assert [p.step for p in node.broker.plans if p.mode is StepMode.TRAIN] == [0, 1, 2]


async def test_commands(controller, node, queue_run):
    run_id = await queue_run(eval_prompts=0, steps=2)
    node.hold = {0}
    controller.start()
    client = await controller.client()
    await _until(lambda: node.broker.plans and node.broker.plans[-1].mode is StepMode.TRAIN)
    paused = await client.pause(run_id)
    assert paused.pause_requested
    assert paused.state is RunState.RUNNING
    node.release_step()

    async def is_paused() -> bool:
        return (await client.get_run(run_id)).state is RunState.PAUSED

    await _until(is_paused)
    saved = await client.save_checkpoint(run_id)
    assert (saved.path, saved.weights_version) == ("/ckpt/1", 1)
    node.hold = {1}
    resumed = await client.resume(run_id)
    assert not resumed.pause_requested
    await _until(lambda: node.broker.plans[-1].step == 1)
    await client.stop(run_id)
    run = await _ended(client, run_id)
    assert run.state is RunState.STOPPED
    assert run.steps_done == 1
    with pytest.raises(FailedPrecondition, match="takes no commands"):
        await client.pause(run_id)
    with pytest.raises(NotFound, match="no run nothing"):
        await client.get_run("nothing")
    await client.close()


async def test_phases_and_cluster(controller, node, queue_run):
    run_id = await queue_run()
    node.hold = {0}
    controller.start()
    async with await controller.client() as client:
        async with asyncio.timeout(20):
            async for update in client.watch_run(run_id):
                if update.phases and all(p.serving for p in update.phases):
                    break
        assert {p.participant for p in update.phases} == {str(p) for p in node.workers}
        assert {(p.phase, p.group, p.serving) for p in update.phases} == {("decode", 1, True)}
        cluster = await client.cluster()
        names = [entry.participant for entry in cluster.services]
        assert names == sorted([*(str(p) for p in node.workers), str(BROKER), "controller/0"])
        assert all(entry.serving for entry in cluster.services)
        await client.stop(run_id)


async def test_a_task_that_can_never_succeed_fails_the_run(controller, node, queue_run):
    run_id = await queue_run()
    node.fail_task = bodies.TaskFailed(
        task="reward",
        code="invalid_argument",
        type="RewardStop",
        message="reward.functions[0] raised",
        retryable=False,
    )
    controller.start()
    async with await controller.client() as client:
        run = await _ended(client, run_id)
    assert run.state is RunState.FAILED
    assert "RewardStop: reward.functions[0] raised" in run.reason


async def test_a_worker_that_never_configures_fails_the_run_with_its_words(
    controller, node, queue_run
):
    run_id = await queue_run()
    worker = next(w for p, w in node.workers.items() if p.service is Service.REFERENCE)
    worker.refuse = "no such weights"
    controller.start()
    async with await controller.client() as client:
        run = await _ended(client, run_id)
    assert run.state is RunState.FAILED
    assert "no step was committed in 4 attempts" in run.reason
    assert "configure of reference/0" in run.reason
    assert "no such weights" in run.reason


async def test_sigterm_ends_the_process_and_the_next_one_goes_on(controller, node, queue_run):
    run_id = await queue_run()
    node.hold = {0}
    controller.start()
    client = await controller.client()
    await _until(lambda: node.broker.plans and node.broker.plans[-1].mode is StepMode.TRAIN)
    assert controller.end(signal.SIGTERM) == 0
    node.hold.clear()
    controller.start()
    assert (await _ended(client, run_id)).state is RunState.SUCCEEDED
    await client.close()


async def test_recipes_that_cannot_run_are_refused(controller, node, tmp_path):
    controller.start()
    async with await controller.client() as client:
        path = tmp_path / "recipe.json"
        path.write_text(json.dumps(recipe() | {"model": {"path": str(tmp_path)}}))
        with pytest.raises(InvalidArgument, match=r"model.path = .* holds no \*.safetensors"):
            await client.create_run(path)
        with pytest.raises(InvalidArgument, match=r"training\.stepz: unknown key"):
            await client.create_run(path, sets=["training.stepz=1"])
        header = json.dumps({"lm_head.weight": {"shape": [1000, 1000]}}).encode()
        (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        node.arena_bytes = 10 * 2**20
        with pytest.raises(ResourceExhausted, match=r"needs 15 MiB of arena .* gives 10 MiB"):
            await client.create_run(path)
        assert await client.list_runs() == []
