"""Replicas whose background work takes turns beside their decode end with the bits of others."""

from __future__ import annotations

import pytest

from common.step.schedule import Schedule
from tests.integration.runs.lab import Lab
from tests.integration.runs.recipes import different, recipe

pytestmark = [pytest.mark.nightly, pytest.mark.redis, pytest.mark.timeout(600)]


async def test_turns_change_no_bit(replicated_node, free_replicated_node, model):
    found = []
    for node in (replicated_node, free_replicated_node):
        wanted = {
            schedule: recipe(model, schedule) for schedule in (Schedule.ROLLPLEX, Schedule.FUSED)
        }
        found.append(await Lab(node, model).succeeded(wanted))
    for governed, free in zip(*found, strict=True):
        assert different(governed.tensors, free.tensors) == []
