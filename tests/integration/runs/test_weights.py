"""All processes of a node read the same weights; one that does not is found by name."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict

import pytest

from common.errors import FailedPrecondition
from common.events.bodies import ModelRole
from rollplex.models import RunState
from tests.integration.runs.faulty.flip import SIGNAL, TENSOR
from tests.integration.runs.lab import reach
from tests.integration.runs.node import REPOSITORY, send
from tests.integration.runs.recipes import different, final_tensors, recipe
from tests.integration.runs.strikes import until

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(240)]

SLOW_REWARD = "tests.integration.runs.task:slow_reward"
READ = [
    ("policy", "learner/0"),
    ("policy", "prefix-encoder/0"),
    ("policy", "rollout/0"),
    ("reference", "reference/0"),
    ("reference", "prefix-encoder/0"),
]


def slow(model):
    return recipe(model, reward={"functions": [{"function": SLOW_REWARD}]}, training={"steps": 4})


async def verified(node, *arguments):
    """Exit code and output of the command."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollplex.cli", "--address", node.deployment.controller_address),
        *("weights", "verify", *arguments),
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 100)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, out.decode() + err.decode()


@pytest.mark.parametrize(
    ("participant", "role"),
    [("rollout/0", ModelRole.POLICY), ("prefix-encoder/0", ModelRole.REFERENCE)],
)
async def test_one_bit_in_the_copy_of_one_process_is_found(faulty_node, model, participant, role):
    node = faulty_node
    folder = node.folder / participant.replace("/", "-")
    async with node.client() as client:
        run = await client.create_run(slow(model), run_dir=folder)
        await reach(client, run.run_id, RunState.RUNNING, steps=1)
        await client.pause(run.run_id)
        paused = await reach(client, run.run_id, RunState.PAUSED)
        before = await client.verify_weights()
        assert before.differences == ()
        assert [(one.role, one.consumer) for one in before.read] == READ
        version = {"policy": paused.steps_done, "reference": 0}
        assert all(one.version == version[one.role] for one in before.read)
        sums = {one.role: one.checksums for one in before.read}
        # what has trained is another model by now
        assert sums["policy"].keys() == sums["reference"].keys()
        assert sums["policy"][TENSOR] != sums["reference"][TENSOR]
        code, text = await verified(node)
        assert (code, "all read the same weights" in text) == (0, True), text

        send(node.pid(participant), SIGNAL)

        async def found():
            return (await client.verify_weights()).differences != ()

        await until(found)
        (one,) = (await client.verify_weights(run.run_id)).differences
        assert (one.tensor, one.consumer, one.role) == (TENSOR, participant, role)
        assert one.version == version[role]
        assert one.expected == sums[role][TENSOR] != one.checksum

        code, text = await verified(node, "--json")
        assert code == 1
        assert json.loads(text)["differences"] == [asdict(one)]
        code, text = await verified(node, run.run_id)
        assert code == 1
        line = f"{TENSOR} {role} {participant} {one.version} {one.checksum} {one.expected}"
        assert line in [" ".join(row.split()) for row in text.splitlines()]

        send(node.pid(participant), SIGNAL)

        async def gone():
            return (await client.verify_weights()).differences == ()

        await until(gone)
        await client.stop(run.run_id)
        await client.wait_run(run.run_id)


async def test_checks_while_steps_run_change_nothing(lab):
    async with lab.node.client() as client:
        (alone,) = await lab.succeeded({"unchecked": slow(lab.model)})
        folder = lab.folder / "checked"
        run = await client.create_run(slow(lab.model), run_dir=folder)
        await reach(client, run.run_id, RunState.RUNNING)
        reports = []
        while not (await client.get_run(run.run_id)).state.ended:
            try:
                reports.append(await client.verify_weights(run.run_id))
            except FailedPrecondition:
                # it is over, or is about to be
                continue
        checked = await client.get_run(run.run_id)
        assert checked.state is RunState.SUCCEEDED, checked.reason
    assert all(report.differences == () for report in reports)
    versions = {one.version for report in reports for one in report.read if one.role == "policy"}
    assert len(versions) >= 2
    assert different(alone.tensors, final_tensors(folder)) == []


async def test_without_a_run_there_is_nothing_to_check(lab):
    async with lab.node.client() as client:
        with pytest.raises(FailedPrecondition, match="no run is at work"):
            await client.verify_weights()
    assert (await verified(lab.node))[0] == 2
