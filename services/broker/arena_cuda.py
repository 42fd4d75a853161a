"""GPU memory of the broker: one piece of shareable memory an allocation.

Freed memory is the device's again as soon as the last process has unmapped it, and any process's
allocator may have it then.
"""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

from common.errors import FailedPrecondition
from common.gpu.context import open_context
from common.gpu.driver import CudaDriverError, device_uuid, memory_info, out_of_memory
from common.gpu.host_memory import PinnedMemory
from common.gpu.shared_memory import OwnedMemory, granularity_bytes, why_not_shareable
from services.broker.arena import Allocation, BudgetedArena, Export, HostCopy
from services.broker.arena_ipc import IpcArena

if TYPE_CHECKING:
    from common.config.deployment import Deployment

log = logging.getLogger(__name__)

_GIB = 2**30
RESERVE_BYTES = 8 * _GIB
"""Left out of the default budget, but at most a quarter of the device: for what the processes take
themselves, such as their CUDA contexts and library workspaces."""
UNLISTED_BYTES = 1 * _GIB
"""Of the device, kept out of what the ledger's rows may come to together: memory of the driver and
of MPS, and what contexts grow by after they were measured."""
MARGIN_BYTES = 6 * _GIB
"""Left free on the device by a restore, for allocators that are about to grow."""


class CudaAllocation:
    """Physical memory of one GPU; not mapped in the broker."""

    def __init__(self, memory: OwnedMemory) -> None:
        self.memory = memory
        self.size_bytes = memory.size_bytes

    def export(self, *, writable: bool) -> Export:
        """See Allocation. A GPU's mapping is writable in any case."""
        try:
            return Export(fd=self.memory.export())
        except CudaDriverError as error:
            raise OSError(errno.EMFILE, str(error)) from error

    def release(self) -> None:
        """Give it up. Idempotent."""
        self.memory.release()


class CudaArena:
    """See the module's text. Failures other than a full device are errors of the whole broker."""

    def __init__(self, ordinal: int) -> None:
        """Open the device's context, the only one of this process.

        Raises:
            CudaMissing: no driver, or no bindings of it.
        """
        self.device = device_uuid(ordinal)
        self.page_bytes = granularity_bytes(ordinal)
        self._ordinal = ordinal

    def allocate(self, size_bytes: int, name: str, *, zeroed: bool) -> CudaAllocation:
        """See Arena."""
        try:
            memory = OwnedMemory(self._ordinal, size_bytes)
        except CudaDriverError as error:
            if not out_of_memory(error):
                raise
            free_bytes, total_bytes = memory_info(self._ordinal)
            reason = f"{error}; {free_bytes} of {total_bytes} bytes are free for all processes"
            raise OSError(errno.ENOMEM, reason) from error
        if zeroed:
            memory.zero()
        return CudaAllocation(memory)

    def free(self, allocation: Allocation) -> None:
        """See Arena."""
        assert isinstance(allocation, CudaAllocation)
        allocation.release()

    def new_copy(self, size_bytes: int) -> PinnedMemory:
        """See SpillingArena."""
        try:
            return PinnedMemory(self._ordinal, size_bytes)
        except CudaDriverError as error:
            if not out_of_memory(error):
                raise
            raise OSError(errno.ENOMEM, f"{size_bytes} bytes of pinned memory: {error}") from error

    def write_out(self, allocation: Allocation, copy: HostCopy) -> None:
        """See SpillingArena."""
        assert isinstance(allocation, CudaAllocation)
        assert isinstance(copy, PinnedMemory)
        with allocation.memory.mapped() as address:
            copy.fill_from(address)

    def read_back(self, copy: HostCopy, name: str) -> CudaAllocation:
        """See SpillingArena. Leaves `MARGIN_BYTES` of the device free."""
        assert isinstance(copy, PinnedMemory)
        free_bytes, total_bytes = memory_info(self._ordinal)
        if free_bytes < copy.size_bytes + MARGIN_BYTES:
            raise OSError(
                errno.ENOMEM,
                f"{free_bytes} of {total_bytes} bytes are free for all processes, "
                f"{copy.size_bytes} and {MARGIN_BYTES} more are wanted",
            )
        allocation = self.allocate(copy.size_bytes, name, zeroed=False)
        with allocation.memory.mapped() as address:
            copy.write_to(address)
        return allocation


def gpu_arena(deployment: Deployment, ordinal: int) -> BudgetedArena:
    """Open one GPU as the deployment wants it.

    Raises:
        CudaMissing: no driver, no bindings of it, or no such GPU.
        FailedPrecondition: the budget is larger than the device, or `arena = "vmm"` does not work.
    """
    uuid = device_uuid(ordinal)
    context_bytes = open_context(ordinal, lock=deployment.context_lock)
    free_bytes, total_bytes = memory_info(ordinal)
    capacity_bytes = budget_bytes(deployment.hbm_budget_gib, total_bytes=total_bytes, device=uuid)
    if capacity_bytes > free_bytes:
        log.warning(
            "others use memory of the GPU that is in the broker's budget",
            extra={"device": uuid, "free_bytes": free_bytes, "budget_bytes": capacity_bytes},
        )
    sharing = _sharing(deployment, ordinal)
    log.info(
        "GPU memory opened",
        extra={
            "device": uuid,
            "total_bytes": total_bytes,
            "budget_bytes": capacity_bytes,
            "kept_back_bytes": total_bytes - capacity_bytes,
            "sharing": sharing,
        },
    )
    if sharing == "ipc":
        # The slab is taken already: nothing that processes hold can keep back a part of it.
        slab = IpcArena(ordinal, capacity_bytes)
        return BudgetedArena(arena=slab, capacity_bytes=capacity_bytes, context_bytes=context_bytes)
    return BudgetedArena(
        arena=CudaArena(ordinal),
        capacity_bytes=capacity_bytes,
        limit_bytes=limit_bytes(deployment.hbm_budget_gib, total_bytes=total_bytes),
        context_bytes=context_bytes,
    )


def budget_bytes(wanted_gib: float | None, *, total_bytes: int, device: str) -> int:
    """How much of a GPU may be handed out and reserved.

    Args:
        wanted_gib: from the deployment; None: all but the reserve.
    """
    reserve_bytes = min(RESERVE_BYTES, total_bytes // 4)
    if wanted_gib is None:
        return total_bytes - reserve_bytes
    wanted_bytes = int(wanted_gib * _GIB)
    if wanted_bytes > total_bytes:
        raise FailedPrecondition(
            f"hbm_budget_gib = {wanted_gib:g}, but {device} has {total_bytes / _GIB:.1f} GiB in "
            f"all; leave it unset for all but {reserve_bytes / _GIB:g} GiB, which contexts and "
            "workspaces need"
        )
    return wanted_bytes


def limit_bytes(wanted_gib: float | None, *, total_bytes: int) -> int:
    """How much of a GPU may be handed out, reserved, and held by processes themselves, together.

    Args: wanted_gib: from the deployment, which binds all of it; None: all that can be listed.
    """
    if wanted_gib is None:
        return total_bytes - UNLISTED_BYTES
    return min(int(wanted_gib * _GIB), total_bytes - UNLISTED_BYTES)


def _sharing(deployment: Deployment, ordinal: int) -> str:
    if deployment.arena == "ipc":
        return "ipc"
    why_not = why_not_shareable(ordinal)
    if not why_not:
        return "vmm"
    if deployment.arena == "vmm":
        raise FailedPrecondition(
            f'arena = "vmm" does not work here: {why_not}; legal here is "ipc"'
        )
    log.warning(
        "GPU memory is shared by legacy IPC handles: the whole budget is taken now and kept, and "
        "nothing is spilled",
        extra={"why": why_not},
    )
    return "ipc"
