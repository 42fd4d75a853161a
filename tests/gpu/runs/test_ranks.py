"""Two ranks of every service, on a GPU each, make the update of one; so do two replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.step.schedule import Schedule
from tests.integration.runs.recipes import relative_difference, steady

if TYPE_CHECKING:
    from tests.integration.runs.lab import Finished, Lab

pytestmark = [pytest.mark.multigpu, pytest.mark.timeout(540)]

TOLERANCE = 1e-4
"""Of float32 sums in another order."""


async def test_two_ranks_make_the_update_of_one(alone: Finished, two_gpu_lab: Lab) -> None:
    await _agree(alone, two_gpu_lab)


async def test_two_replicas_make_the_update_of_one(alone: Finished, two_replica_lab: Lab) -> None:
    await _agree(alone, two_replica_lab)


async def _agree(alone: Finished, together: Lab) -> None:
    found = {}
    for schedule in (Schedule.SERIAL, Schedule.ROLLPLEX, Schedule.FUSED):
        wanted = steady(together.model, schedule, replay_from=str(alone.folder))
        (actual,) = await together.succeeded({f"together-{schedule}": wanted})
        found[schedule] = relative_difference(alone.tensors, actual.tensors)
    print(found)  # noqa: T201 - the measured differences
    assert max(found.values()) <= TOLERANCE
