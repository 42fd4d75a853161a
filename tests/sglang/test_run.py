"""Whole runs with SGLang as the engine, on a real node."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from common.errors import DeadlineExceeded
from common.step.schedule import Schedule
from common.vlm.initialise import initialise, load_spec
from rollplex.models import RunState
from services.rollout.engines.sglang.make import RESERVATION
from tests.integration.runs.lab import Lab, reach
from tests.integration.runs.node import REPOSITORY, Node, children, gone
from tests.integration.runs.recipes import recipe
from tests.sglang.node import node_with_sglang

if TYPE_CHECKING:
    from rollplex.client import Client

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(590)]

BOUND = 1e-4
ROLLOUT_SERVICE = "rollout/0"
GONE_S = 30.0
POLL_S = 0.05
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
    with node_with_sglang(request, engine_python) as node:
        yield Lab(node, model)


async def test_a_run_trains_with_a_tower_that_changes(lab):
    """Its responses are those of the native engine, and it gives back memory between windows."""
    native = {name: value for name, value in ROLLOUT.items() if "sglang" not in (name, value)}
    wanted = {
        "sglang": recipe(lab.model, Schedule.ROLLPLEX, rollout=ROLLOUT),
        "native": recipe(lab.model, Schedule.ROLLPLEX, rollout=native),
    }
    over = asyncio.Event()
    watch = asyncio.create_task(reserved(lab.node, over))
    run, other = await lab.succeeded(wanted)
    over.set()
    assert len(run.steps) == 3
    for step, theirs in zip(run.steps, other.steps, strict=True):
        assert 0 < step["metrics"]["mismatch_abs_max"] < BOUND
        for name in ("reward_mean", "response_tokens"):
            assert step["metrics"][name] == theirs["metrics"][name]
    sizes = (await watch)[run.run.run_id]
    assert set(sizes) == {0, max(sizes)}
    # in the window of each step, and not between them
    assert sizes.count(max(sizes)) >= 3


async def test_a_run_outlives_its_engine(lab):
    """Weights in buckets, the other schedule, and SGLang's processes killed after a step; then
    their service."""
    rollout = {**ROLLOUT, "sglang": {"logprob_bound": BOUND, "weights": "copy"}}
    wanted = recipe(lab.model, Schedule.SERIAL, rollout=rollout, training={"steps": 5})
    folder = lab.folder / "killed"
    async with lab.node.client() as client:
        run = await client.create_run(wanted, run_dir=folder)
        await reach(client, run.run_id, RunState.RUNNING, steps=1)
        (host,) = engine_hosts(lab.node.pid(ROLLOUT_SERVICE))
        os.killpg(host, signal.SIGKILL)
        await unhealthy(client, f"SGLang's processes ({host}) have ended")
        await reach(client, run.run_id, RunState.RUNNING, steps=3)
        service = lab.node.pid(ROLLOUT_SERVICE)
        left = children(service)
        assert engine_hosts(service)
        os.kill(service, signal.SIGKILL)
        assert await gone(left, within_s=GONE_S) == set()
        run = await client.wait_run(run.run_id)
    assert run.state is RunState.SUCCEEDED, run.reason
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2, 3, 4]
    for step in steps:
        assert 0 < step["metrics"]["mismatch_abs_max"] < BOUND


async def reserved(node: Node, over: asyncio.Event) -> dict[str, list[int]]:
    """By run, the sizes that the engine's reservation has one after the other."""
    sizes: dict[str, list[int]] = {}
    async with node.broker() as stub:
        while not over.is_set():
            await asyncio.sleep(POLL_S)
            try:
                entries = await node.entries(stub)
            except DeadlineExceeded:
                continue
            now = {entry.run_id: entry.bytes for entry in entries if entry.name == RESERVATION}
            loaded = {entry.run_id for entry in entries if entry.name == "policy.weights"}
            for run_id in now.keys() | (loaded & sizes.keys()):
                seen = sizes.setdefault(run_id, [])
                if seen[-1:] != [now.get(run_id, 0)]:
                    seen.append(now.get(run_id, 0))
    return sizes


async def unhealthy(client: Client, reason: str) -> None:
    """Wait until the rollout's health says so."""
    (entry,) = [
        each for each in (await client.cluster()).services if each.participant == ROLLOUT_SERVICE
    ]
    address, _, port = entry.http_address.rpartition(":")
    answer = (0, "")
    while answer != (503, f"{reason}\n"):
        with closing(http.client.HTTPConnection(address, int(port), timeout=GONE_S)) as connection:
            connection.request("GET", "/healthz")
            reply = connection.getresponse()
            answer = (reply.status, reply.read().decode())
        await asyncio.sleep(POLL_S)


def engine_hosts(rollout: int) -> list[int]:
    """Pids of the children that lead a process group of their own."""
    return [pid for pid in children(rollout) if os.getpgid(pid) == pid]
