"""Two ranks of every service, on a GPU each, make the update of one; so do two replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.step.schedule import Schedule
from tests.integration.runs.recipes import relative_difference
from tests.integration.runs.test_ranks import recorded, steady

if TYPE_CHECKING:
    from tests.integration.runs.lab import Lab

pytestmark = [pytest.mark.multigpu, pytest.mark.timeout(400)]

TOLERANCE = 1e-4
"""Of float32 sums in another order."""


async def test_two_ranks_make_the_update_of_one(gpu_lab: Lab, two_gpu_lab: Lab) -> None:
    await _agree(gpu_lab, two_gpu_lab)


async def test_two_replicas_make_the_update_of_one(gpu_lab: Lab, two_replica_lab: Lab) -> None:
    await _agree(gpu_lab, two_replica_lab)


async def _agree(alone: Lab, together: Lab) -> None:
    expected = await recorded(alone)
    found = {}
    for schedule in (Schedule.SERIAL, Schedule.ROLLPLEX, Schedule.FUSED):
        wanted = steady(together.model, schedule, replay_from=str(expected.folder))
        (actual,) = await together.succeeded({f"together-{schedule}": wanted})
        found[schedule] = relative_difference(expected.tensors, actual.tensors)
    print(found)  # noqa: T201 - the measured differences
    assert max(found.values()) <= TOLERANCE
