"""Runs whose background work is governed, on a CPU: it takes turns, and is measured."""

from __future__ import annotations

import pytest

from common.governor.table import load_table
from common.ids import Service
from common.step.schedule import Schedule
from common.step.tasks import OWNER, Task
from tests.integration.runs.lab import Lab
from tests.integration.runs.recipes import different, recipe

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(240)]


@pytest.fixture
def governed(governed_node, model):
    return Lab(governed_node, model)


async def test_governed_runs_end_with_the_same_bits(governed):
    wanted = {
        schedule.value: recipe(governed.model, schedule)
        for schedule in (Schedule.SERIAL, Schedule.ROLLPLEX)
    }
    serial, rollplex = await governed.succeeded(wanted)
    assert different(serial.tensors, rollplex.tensors) == []


async def test_what_ran_beside_the_decode_is_logged_and_measured(governed):
    (fused,) = await governed.succeeded({"fused": recipe(governed.model, Schedule.FUSED)})
    assert all(step["metrics"].get("sm_share_mean") is None for step in fused.steps)
    background = {task for task in Task if OWNER[task] is not Service.ROLLOUT}
    logs = "".join(governed.node.log(f"{service}-0") for service in Service)
    lines = [line for line in logs.splitlines() if "beside the decode" in line]
    assert lines
    for line in lines:
        assert any(f"{task}=" in line for task in background)
    for path in (fused.folder / "governor").glob("*.json"):
        table = load_table(path)
        assert table.device == "cpu"
        assert {OWNER[entry.task] for entry in table.entries} == {Service(path.stem)}
