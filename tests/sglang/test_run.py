"""Whole runs with SGLang as the engine, on a real node."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from common.step.schedule import Schedule
from common.vlm.initialise import initialise, load_spec
from rollplex.models import RunState
from tests.integration.runs.lab import Lab, reach
from tests.integration.runs.node import REPOSITORY, Node, children, deployment
from tests.integration.runs.recipes import recipe

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(590)]

BOUND = 1e-4
ROLLOUT = {
    "samples_per_group": 2,
    "max_new_tokens": 12,
    "max_slots": 8,
    "engine": "sglang",
    "sglang": {"logprob_bound": BOUND},
}


@pytest.fixture(scope="module")
def lab(request, engine_python, tmp_path_factory):
    """A node whose rollout has SGLang, which pads the model's vocabulary; its head is tied."""
    model = tmp_path_factory.mktemp("model") / "tiny"
    initialise(load_spec(REPOSITORY / "rollplex" / "verify" / "model.toml"), model)
    # Not pytest's folder: its long names make a Unix socket's path too long.
    with tempfile.TemporaryDirectory(prefix="rollplex-sglang-") as name:
        folder = Path(name)
        made = deployment(folder / "node", name="sglang", engine_python=engine_python)
        node = Node(made, folder)
        failed_before = request.session.testsfailed
        try:
            node.start()
            yield Lab(node, model)
        finally:
            node.stop()
            if request.session.testsfailed > failed_before:
                sys.stdout.write(node.complaints())


async def test_a_run_trains_with_a_tower_that_changes(lab):
    wanted = {"rollplex": recipe(lab.model, Schedule.ROLLPLEX, rollout=ROLLOUT)}
    (run,) = await lab.succeeded(wanted)
    assert len(run.steps) == 3
    for step in run.steps:
        assert 0 < step["metrics"]["mismatch_abs_max"] < BOUND


async def test_a_run_outlives_its_engine(lab):
    """Weights in buckets, the other schedule, and SGLang's processes killed after a step."""
    rollout = {**ROLLOUT, "sglang": {"logprob_bound": BOUND, "weights": "copy"}}
    wanted = recipe(lab.model, Schedule.SERIAL, rollout=rollout)
    folder = lab.node.folder / "killed"
    async with lab.node.client() as client:
        run = await client.create_run(wanted, run_dir=folder)
        await reach(client, run.run_id, RunState.RUNNING, steps=1)
        (host,) = engine_hosts(lab.node.pid("rollout/0"))
        os.killpg(host, signal.SIGKILL)
        run = await client.wait_run(run.run_id)
    assert run.state is RunState.SUCCEEDED, run.reason
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2]
    for step in steps:
        assert 0 < step["metrics"]["mismatch_abs_max"] < BOUND


def engine_hosts(rollout: int) -> list[int]:
    """Pids of the children that lead a process group of their own."""
    return [pid for pid in children(rollout) if os.getpgid(pid) == pid]
