"""Reference weights that leave their device while nothing reads them: same result, fewer bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.step.schedule import Schedule
from tests.integration.runs.conftest import storage_bytes
from tests.integration.runs.recipes import different, recipe

if TYPE_CHECKING:
    from common.config.recipe import Recipe

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(240)]


def wanted(lab, schedule: Schedule, *, spill: bool) -> Recipe:
    return recipe(
        lab.model,
        schedule,
        data={"eval": "rollplex.verify.task:rows"},
        training={"spill_reference": spill, "eval_every_steps": 2, "eval_prompts": 2},
    )


@pytest.mark.parametrize("schedule", list(Schedule))
async def test_the_update_is_the_same_bit_for_bit(lab, schedule):
    kept, spilled = await lab.succeeded(
        {
            f"reference-kept-{schedule}": wanted(lab, schedule, spill=False),
            f"reference-spilled-{schedule}": wanted(lab, schedule, spill=True),
        }
    )
    assert spilled.run.restarts == 0
    assert different(kept.tensors, spilled.tensors) == []
    assert not [name for step in kept.steps for name in step["metrics"] if "reference_w" in name]
    # Five storages of this run are as large as the reference's weights, to the page.
    weights_bytes = storage_bytes(lab.model) / 5
    for done, doing in (("spilled", "spill"), ("restored", "restore")):
        # A small step may have ended before its last move has, which then counts in the next one.
        moved = [
            step["metrics"].get(f"reference_weights_{done}_bytes", 0) for step in spilled.steps
        ]
        size_bytes = min(filter(None, moved))
        assert size_bytes == pytest.approx(weights_bytes, rel=0.05)
        assert [total % size_bytes for total in moved] == [0] * len(moved)
        seconds = f"time_reference_weights_{doing}_s"
        assert all(
            (seconds in step["metrics"]) == bool(n)
            for step, n in zip(spilled.steps, moved, strict=True)
        )
