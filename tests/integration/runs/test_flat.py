"""A run of many steps takes no more of anything at its end than after its first steps."""

from __future__ import annotations

import asyncio

import pytest

from rollplex.models import RunState
from tests.integration.runs.footprint import (
    ALLOWED,
    DESCRIPTORS,
    LEASES,
    RESIDENT,
    footprint,
    grown,
)
from tests.integration.runs.lab import reach
from tests.integration.runs.recipes import recipe

STEPS = 50
WARM_UP = 15
"""Steps after which caches are full, pools have their threads, and nothing has a reason to grow."""
SETTLE_S = 5.0
"""What is let go in the background, such as mappings, may take this long."""


def smallest(model):
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


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.timeout(240)
async def test_a_run_of_many_steps_is_flat(lab):
    async with lab.node.client() as client, lab.node.broker() as stub:
        run = await client.create_run(smallest(lab.model), run_dir=lab.folder / "flat")

        async def paused_at(steps: int) -> None:
            await reach(client, run.run_id, RunState.RUNNING, steps=steps)
            await client.pause(run.run_id)
            await reach(client, run.run_id, RunState.PAUSED)

        await paused_at(WARM_UP)
        before = await footprint(lab.node, stub)
        await client.resume(run.run_id)
        await paused_at(STEPS - 5)
        left = await what_grew(lab.node, stub, before)
        await client.resume(run.run_id)
        run = await client.wait_run(run.run_id)
        assert left == [], "\n".join(left)
        assert run.state is RunState.SUCCEEDED, run.reason
        assert (run.steps_done, run.restarts) == (STEPS, 0)
        assert await lab.node.entries(stub, run.run_id) == []


async def what_grew(node, stub, before) -> list[str]:
    """What is grown still when everything that ends in the background has ended."""
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + SETTLE_S
    while left := grown(before, await footprint(node, stub)):
        if loop.time() > give_up_s:
            break
        await asyncio.sleep(0.1)
    return left


def test_what_grows_with_every_step_is_named():
    before = {
        ("learner/0", DESCRIPTORS): 40,
        ("learner/0", RESIDENT): 10_000_000,
        ("ledger", LEASES): 3,
    }
    within = {key: size + ALLOWED[key[1]] for key, size in before.items()}
    assert grown(before, within) == []
    assert grown(within, before) == []
    leaking = dict(before) | {("learner/0", DESCRIPTORS): 73, ("ledger", LEASES): 4}
    assert grown(before, leaking) == [
        "learner/0: descriptors grew by 33, from 40 to 73; 4 are allowed",
        "ledger: leases grew by 1, from 3 to 4; 0 are allowed",
    ]
