"""A run of many steps, and what has grown between its first steps and its last ones."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rollplex.models import RunState
from tests.integration.runs.footprint import footprint, grown
from tests.integration.runs.lab import reach
from tests.integration.runs.recipes import recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from common.config.recipe import Recipe
    from rollplex.client import Client
    from rollplex.models import Run
    from tests.integration.runs.footprint import Footprint
    from tests.integration.runs.lab import Lab
    from tests.integration.runs.node import BrokerStub

STEPS = 50
WARM_UP = 15
"""Steps after which caches are full, pools have their threads, and nothing has a reason to grow."""
SETTLE_S = 5.0
"""What is let go in the background, such as mappings, may take this long."""


def smallest(model: Path) -> Recipe:
    """Everything that comes and goes in a step: leases, work ahead, spilled storages."""
    return recipe(
        model,
        model={"train_vision": False},
        rollout={"samples_per_group": 2, "max_new_tokens": 4},
        training={
            "steps": STEPS,
            "prompts_per_step": 2,
            "spill_optimizer": True,
            "spill_reference": True,
            "final_checkpoint": False,
        },
    )


async def a_long_run(
    lab: Lab,
    client: Client,
    stub: BrokerStub,
    *,
    allowed: Mapping[str, int],
    more: Callable[[], Footprint] = dict,
) -> tuple[Run, list[str], Footprint, Footprint]:
    """Make the run, and stop it twice for a look.

    Args:
        allowed: growth that is none, by what it is of.
        more: what else is looked at.
    Returns: the run at its end, what had grown, and both looks.
    """

    async def look() -> Footprint:
        return await footprint(lab.node, stub) | more()

    async def paused_at(steps: int) -> None:
        await reach(client, run.run_id, RunState.RUNNING, steps=steps)
        await client.pause(run.run_id)
        await reach(client, run.run_id, RunState.PAUSED)

    run = await client.create_run(smallest(lab.model), run_dir=lab.folder / "flat")
    await paused_at(WARM_UP)
    before = await look()
    await client.resume(run.run_id)
    await paused_at(STEPS - 5)
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + SETTLE_S
    # until everything that ends in the background has ended
    while left := grown(before, after := await look(), allowed):
        if loop.time() > give_up_s:
            break
        await asyncio.sleep(0.1)
    await client.resume(run.run_id)
    return await client.wait_run(run.run_id), left, before, after
