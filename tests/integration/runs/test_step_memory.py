"""`rollplex memory --step` beside a run."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from common.errors import FailedPrecondition
from rollplex.report.step_memory import sample_step
from tests.integration.runs.recipes import recipe

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(240)]

SLOW = {"functions": [{"function": "tests.integration.runs.task:slow_reward"}]}


async def test_the_picture_is_of_one_whole_step(lab, tmp_path):
    png = tmp_path / "step.png"
    address = lab.node.deployment.controller_address
    async with lab.node.client() as client:
        with pytest.raises(FailedPrecondition, match="no run is at work"):
            await sample_step(client)
        asked = recipe(lab.model, reward=SLOW, training={"steps": 500})
        run = await client.create_run(asked, run_dir=lab.folder / "step-memory")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollplex.cli", "--address", address),
            *("memory", "--step", "--png", str(png), "--json"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        await client.stop(run.run_id)
        await client.wait_run(run.run_id)

    found = json.loads(out)
    phases, memory = found["step"], found["memory"]
    lines = (Path(run.run_dir) / "timeline.jsonl").read_text().splitlines()
    mine = [span for span in map(json.loads, lines) if span["epoch"] == phases["epoch"]]
    assert {span["step"] for span in mine} == {phases["step"]}
    length_s = phases["end_s"] - phases["start_s"]
    assert phases["end_s"] == pytest.approx(max(span["end_ns"] for span in mine) / 1e9)
    assert (memory["start_s"], memory["times_s"][0]) == (phases["start_s"], 0.0)
    assert memory["times_s"][-1] == pytest.approx(length_s)
    assert memory["times_s"] == sorted(memory["times_s"])
    ((opened_s, closed_s),) = phases["windows"]
    borders = dict(phases["borders"])
    assert phases["start_s"] < opened_s < closed_s <= borders["training"] < borders["update"]

    sums = [sum(values) for values in zip(*memory["classes"].values(), strict=True)]
    assert sums == memory["totals"]
    assert min(memory["classes"]["policy.weights"]) > 0
    assert max(memory["totals"]) > min(memory["totals"])
    with Image.open(png) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 500
