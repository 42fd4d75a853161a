"""A run of many steps on a GPU takes no more of anything at its end than after its first steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.gpu.driver import device_uuid
from rollplex.models import RunState
from tests.integration.runs.flat import STEPS, a_long_run
from tests.integration.runs.footprint import ALLOWED, MIB, RESIDENT

if TYPE_CHECKING:
    from tests.integration.runs.footprint import Footprint
    from tests.integration.runs.lab import Lab

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DEVICE = "bytes of the GPU"
ALLOWED_HERE = ALLOWED | {
    # Kernels that are compiled, and loaded, for a length that is new in a late step.
    RESIDENT: 64 * MIB,
    DEVICE: 32 * MIB,
}
"""Growth that is none; a leak of 2 MiB, the driver's smallest piece, in each step is 60."""


def of_the_driver() -> Footprint:
    """In use on the first GPU by all processes."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(device_uuid(0))
    return {("GPU", DEVICE): int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)}


async def test_a_run_of_many_steps_is_flat(gpu_lab: Lab) -> None:
    async with gpu_lab.node.client() as client, gpu_lab.node.broker() as stub:
        run, left, before, after = await a_long_run(
            gpu_lab, client, stub, allowed=ALLOWED_HERE, more=of_the_driver
        )
        for who, what in before:
            print(f"{who}: {what}: {before[who, what]} {after[who, what]}")  # noqa: T201 - measured
        assert left == [], "\n".join(left)
        assert run.state is RunState.SUCCEEDED, run.reason
        assert (run.steps_done, run.restarts) == (STEPS, 0)
        assert await gpu_lab.node.entries(stub, run.run_id) == []
