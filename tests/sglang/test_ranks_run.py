"""Whole runs with SGLang where each service has two processes: ranks, or replicas."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import pytest

from common.events.bodies import ModelRole
from common.step.schedule import Schedule
from common.vlm.initialise import initialise, load_spec
from rollplex.models import RunState
from tests.integration.runs.lab import Lab, reach
from tests.integration.runs.node import REPOSITORY
from tests.integration.runs.recipes import final_tensors, relative_difference, steady
from tests.sglang.conftest import VOCABULARY
from tests.sglang.node import node_with_sglang, scheduler

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(2400)]

RANKS = 2
NODES = {
    "ranks": ({"train_tp": RANKS, "rollout_tp": RANKS}, [1, 0]),
    "replicas": ({"dp": RANKS}, [1, 1]),
}
"""Settings of the deployment, and how many engines each process of the rollout starts in a run."""
START_S = 900.0
BOUND = 1e-4
STEPS = 4


@dataclass(frozen=True, slots=True)
class Several:
    """A lab, and how many engines each process of its rollout starts in a run."""

    lab: Lab
    engines: list[int]


@pytest.fixture(scope="module")
def several(request, engine_python, tmp_path_factory):
    spec = load_spec(REPOSITORY / "rollplex" / "verify" / "model.toml")
    tokenizer = spec.tokenizer.model_copy(update={"fill_to_tokens": VOCABULARY})
    model = tmp_path_factory.mktemp("model") / "tiny"
    initialise(spec.model_copy(update={"tokenizer": tokenizer}), model)
    settings, engines = NODES[request.param]
    with node_with_sglang(request, engine_python, start_s=START_S, **settings) as node:
        yield Several(Lab(node, model), engines)


def wanted(lab, engine):
    recipe = steady(lab.model, Schedule.ROLLPLEX, steps=STEPS)
    rollout = recipe.rollout.model_dump() | {"engine": engine}
    if engine == "sglang":
        rollout["sglang"] = {"logprob_bound": BOUND, "start_s": START_S}
    return type(recipe).model_validate(recipe.model_dump() | {"rollout": rollout})


@pytest.mark.parametrize("several", NODES, indirect=True)
async def test_the_update_is_that_of_the_native_engine(several):
    lab = several.lab
    native, sglang = await lab.succeeded(
        {engine: wanted(lab, engine) for engine in ("native", "sglang")}
    )
    assert relative_difference(native.tensors, sglang.tensors) <= 1e-5
    for step, theirs in zip(sglang.steps, native.steps, strict=True):
        assert 0 < step["metrics"]["mismatch_abs_max"] < BOUND
        assert step["metrics"]["response_tokens"] == theirs["metrics"]["response_tokens"]
    for rank, engines in enumerate(several.engines):
        lines = lab.node.log(f"rollout-{rank}").splitlines()
        up = [line for line in lines if "SGLang is up" in line]
        assert len(up) == engines
        assert all("copied_bytes=0" in line for line in up)


@pytest.mark.parametrize("several", ["ranks"], indirect=True)
async def test_a_run_outlives_a_rank_and_a_process_of_its_engine(several):
    lab = several.lab
    (calm,) = await lab.succeeded({"sglang": wanted(lab, "sglang")})
    async with lab.node.client() as client:
        run = await client.create_run(wanted(lab, "sglang"), run_dir=lab.folder / "killed")
        await reach(client, run.run_id, RunState.RUNNING, steps=1)
        await client.pause(run.run_id)
        await reach(client, run.run_id, RunState.PAUSED)
        report = await client.verify_weights()
        assert report.differences == ()
        read = {one.consumer for one in report.read if one.role is ModelRole.POLICY}
        assert {f"rollout/{rank}" for rank in range(RANKS)} <= read
        await client.resume(run.run_id)
        os.kill(lab.node.pid("rollout/1"), signal.SIGKILL)
        await reach(client, run.run_id, RunState.RUNNING, steps=2)
        os.kill(scheduler(lab.node.pid("rollout/0"), rank=1), signal.SIGKILL)
        run = await client.wait_run(run.run_id)
    assert run.state is RunState.SUCCEEDED, run.reason
    assert relative_difference(calm.tensors, final_tensors(lab.folder / "killed")) <= 1e-5
