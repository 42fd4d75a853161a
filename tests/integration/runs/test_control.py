"""A client pauses, resumes, saves, stops; a stopped run is continued from its checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.errors import FailedPrecondition
from rollplex.models import RunState
from tests.integration.runs.lab import reach
from tests.integration.runs.recipes import different, final_tensors, recipe

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(240)]

STEPS = 6
SLOW_REWARD = "tests.integration.runs.task:slow_reward"
COURSE = {"lr_schedule": "cosine", "warmup_steps": 2}


def planned(lab):
    """Its learning rate tells one step from another."""
    return recipe(
        lab.model,
        algorithm=COURSE,
        reward={"functions": [{"function": SLOW_REWARD}]},
        training={"steps": STEPS, "checkpoint_every_steps": 4, "keep_checkpoints": 3},
    )


async def test_a_resumed_run_equals_the_uninterrupted_one(lab):
    async with lab.node.client() as client:
        run = await client.create_run(planned(lab), run_dir=lab.folder / "interrupted")
        # It waits in the queue until the first one is stopped.
        whole_run = asyncio.create_task(lab.succeeded({"whole": planned(lab)}))
        await reach(client, run.run_id, RunState.RUNNING, steps=1)
        await client.pause(run.run_id)
        paused = await reach(client, run.run_id, RunState.PAUSED)
        saved = await client.save_checkpoint(run.run_id)
        assert saved.weights_version == paused.steps_done
        stopped = await client.stop(run.run_id)
        stopped = await client.wait_run(run.run_id)
        assert stopped.state is RunState.STOPPED
        assert stopped.steps_done == paused.steps_done < STEPS

        (resumed,) = await lab.succeeded({"resumed": planned(lab)}, resume_from=Path(saved.path))
        (whole,) = await whole_run
    assert [step["step"] for step in resumed.steps] == list(range(paused.steps_done, STEPS))
    assert different(whole.tensors, resumed.tensors) == []
    rates = {step["step"]: step["metrics"]["learning_rate"] for step in whole.steps}
    for step in resumed.steps:
        assert step["metrics"]["learning_rate"] == rates[step["step"]]


async def test_a_paused_run_waits_and_goes_on(lab):
    async with lab.node.client() as client:
        run = await client.create_run(planned(lab), run_dir=lab.folder / "paused")
        await reach(client, run.run_id, RunState.RUNNING, steps=1)
        await client.pause(run.run_id)
        paused = await reach(client, run.run_id, RunState.PAUSED)
        # Between two steps only what lives as long as the run has memory.
        async with lab.node.broker() as stub:
            entries = await lab.node.entries(stub, run.run_id)
        assert entries
        assert not [entry.name for entry in entries if entry.HasField("lease_id")]
        await asyncio.sleep(0.5)
        assert (await client.get_run(run.run_id)).steps_done == paused.steps_done
        await client.resume(run.run_id)
        ended = await client.wait_run(run.run_id)
        assert ended.state is RunState.SUCCEEDED
        (whole,) = await lab.succeeded({"whole": planned(lab)})
        assert different(whole.tensors, final_tensors(Path(ended.run_dir))) == []
        with pytest.raises(FailedPrecondition, match="takes no commands"):
            await client.pause(run.run_id)


async def test_stop_now_and_stop_after_the_step(lab):
    async with lab.node.client() as client:
        # The second one waits in the queue for the end of the first.
        runs = await asyncio.gather(
            *(
                client.create_run(planned(lab), run_dir=lab.folder / name)
                for name in ("stopped-now", "stopped-after-step")
            )
        )
        for run in sorted(runs, key=lambda run: run.created):
            after_step = run.run_dir.endswith("stopped-after-step")
            await reach(client, run.run_id, RunState.RUNNING, steps=1)
            await client.stop(run.run_id, after_step=after_step)
            ended = await client.wait_run(run.run_id)
            assert ended.state is RunState.STOPPED
            assert 1 <= ended.steps_done < STEPS
        async with lab.node.broker() as stub:
            assert await lab.node.entries(stub) == []
