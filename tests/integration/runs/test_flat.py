"""A run of many steps takes no more of anything at its end than after its first steps."""

from __future__ import annotations

import pytest

from rollplex.models import RunState
from tests.integration.runs.flat import STEPS, a_long_run
from tests.integration.runs.footprint import ALLOWED, DESCRIPTORS, LEASES, RESIDENT, grown


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.timeout(240)
async def test_a_run_of_many_steps_is_flat(lab):
    async with lab.node.client() as client, lab.node.broker() as stub:
        run, left, _, _ = await a_long_run(lab, client, stub, allowed=ALLOWED)
        assert left == [], "\n".join(left)
        assert run.state is RunState.SUCCEEDED, run.reason
        assert (run.steps_done, run.restarts) == (STEPS, 0)
        assert await lab.node.entries(stub, run.run_id) == []


def test_what_grows_with_every_step_is_named():
    before = {
        ("learner/0", DESCRIPTORS): 40,
        ("learner/0", RESIDENT): 10_000_000,
        ("ledger", LEASES): 3,
    }
    within = {key: size + ALLOWED[key[1]] for key, size in before.items()}
    assert grown(before, within, ALLOWED) == []
    assert grown(within, before, ALLOWED) == []
    leaking = dict(before) | {("learner/0", DESCRIPTORS): 73, ("ledger", LEASES): 4}
    assert grown(before, leaking, ALLOWED) == [
        "learner/0: descriptors grew by 33, from 40 to 73; 4 are allowed",
        "ledger: leases grew by 1, from 3 to 4; 0 are allowed",
    ]
