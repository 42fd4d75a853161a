"""Whether this process can still use its GPU.

An illegal access, or another fault of a kernel, ends the CUDA context that it happened in, for
good; under MPS it ends those of all clients of that GPU. Every later call then fails, so all that
is left to such a process is to end and to be started again. MPS takes no new client while one of
the old ones lives, so it has to end soon.
"""

from __future__ import annotations

import asyncio

from common.errors import ProcessUnusable
from common.gpu.driver import bindings, permit_during_capture, use_primary_context

LOOK_S = 0.5
"""Between two looks; each takes some microseconds and waits for nothing."""


class DeviceLost(ProcessUnusable):
    """The process's CUDA context has ended with a fault; only a new process can use the GPU."""


async def watch(ordinal: int) -> None:
    """Look at the context of a GPU again and again, until cancelled.

    Args:
        ordinal: in this process's numbering.
    Raises: DeviceLost once the context has ended.
    """
    use_primary_context(ordinal)
    driver = bindings()
    _, stream = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    fine = (driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NOT_READY)
    while True:
        use_primary_context(ordinal)
        permit_during_capture()
        (status,) = driver.cuStreamQuery(stream)
        if status not in fine:
            raise DeviceLost(
                f"GPU {ordinal} is lost to this process: {status.name}; it has to start again",
                status=str(status.name),
            )
        await asyncio.sleep(LOOK_S)
