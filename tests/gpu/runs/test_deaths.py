"""Services killed while their kernels run, and a fault that takes every client of the GPU."""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from common.step.schedule import Schedule
from deploy.local.programs import node_mps
from rollplex.models import RunState
from tests.gpu.tensors.conftest import SLACK_BYTES, free_bytes, until
from tests.integration.runs.lab import reach
from tests.integration.runs.moments import BROKER, ENCODER, LEARNER, REFERENCE, ROLLOUT, Striker
from tests.integration.runs.node import REPOSITORY, children, gone
from tests.integration.runs.recipes import recipe

if TYPE_CHECKING:
    from tests.integration.runs.lab import Lab

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

STEPS = 40
PATIENCE = timedelta(seconds=120)
SERVICES = (ROLLOUT, ENCODER, REFERENCE, LEARNER, BROKER)
BLOWS = (
    (Striker.window, ROLLOUT),
    (Striker.encoder_accumulates, ENCODER),
    (Striker.scoring, REFERENCE),
    (Striker.updating, LEARNER),
    (Striker.window, BROKER),
)
PROCESSES_END_S = 20.0


async def test_a_run_survives_the_death_of_each_service(gpu_lab: Lab) -> None:
    before, node = free_bytes(), gpu_lab.node
    wanted = recipe(gpu_lab.model, Schedule.FUSED, training={"steps": STEPS})
    async with node.client() as client:
        run = await client.create_run(wanted, run_dir=node.folder / "killed")
        async with Striker(node, client, run) as striker:
            ended = asyncio.create_task(client.wait_run(run.run_id, patience=PATIENCE))
            struck = [await moment(striker, victim) for moment, victim in BLOWS]
            run = await ended
    assert run.state is RunState.SUCCEEDED, run.reason
    assert run.steps_done == STEPS
    assert run.restarts >= 1
    assert {blow.victim for blow in struck} == set(SERVICES)
    processes = set().union(*({node.pid(name), *children(node.pid(name))} for name in SERVICES))
    await asyncio.to_thread(node.stop)
    assert not await gone(processes, within_s=PROCESSES_END_S)
    await until(lambda: free_bytes() > before - SLACK_BYTES, "what the node held is free")


async def test_a_fault_that_takes_all_clients_restarts_the_set(gpu_lab: Lab) -> None:
    node = gpu_lab.node
    mps = node_mps(node.deployment)
    assert mps is not None
    wanted = recipe(gpu_lab.model, Schedule.FUSED, training={"steps": STEPS})
    async with node.client() as client:
        run = await client.create_run(wanted, run_dir=node.folder / "faulted")
        await reach(client, run.run_id, RunState.RUNNING, steps=3)
        old = {name: node.pid(name) for name in SERVICES}
        fault = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.gpu.runs.fault"),
            cwd=REPOSITORY,
            env={**os.environ, **mps.environment},
        )
        assert await fault.wait() == 0
        run = await client.wait_run(run.run_id, patience=PATIENCE)
    restarted = [name for name, pid in old.items() if node.pid(name) != pid]
    print(f"started again: {restarted}; restarts of the run: {run.restarts}")  # noqa: T201
    assert run.state is RunState.SUCCEEDED, run.reason
    assert run.steps_done == STEPS
    assert not restarted or run.restarts >= 1
