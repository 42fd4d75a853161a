"""GPU memory of the broker as parts of one slab, shared by a legacy CUDA IPC handle.

The fallback where descriptors do not work. The slab is taken at the start and kept until the
process ends: what is freed is free for other leases, not for other allocators. A process that was
killed may still have kernels in flight when its parts are handed out again; with descriptors it
cannot harm anybody.
"""

from __future__ import annotations

import bisect
import errno
from typing import TYPE_CHECKING

from common.gpu.driver import device_uuid
from common.gpu.legacy_ipc import OwnedSlab
from services.broker.arena import Allocation, Export, IpcPlace

if TYPE_CHECKING:
    from collections.abc import Iterator


class Extents:
    """Which parts of a slab are free.

    Invariant: the free parts are in order, and no two of them touch.
    """

    def __init__(self, size_bytes: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size_bytes)] if size_bytes else []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The free parts as offset and size, in order."""
        return iter(self._free)

    def take(self, size_bytes: int) -> int:
        """Take the first part that is large enough.

        Returns: its offset.

        Raises:
            OSError: no part is.
        """
        for index, (offset_bytes, free_bytes) in enumerate(self._free):
            if free_bytes >= size_bytes:
                rest = (offset_bytes + size_bytes, free_bytes - size_bytes)
                self._free[index : index + 1] = [rest] if rest[1] else []
                return offset_bytes
        largest_bytes = max((size for _, size in self._free), default=0)
        total_bytes = sum(size for _, size in self._free)
        raise OSError(
            errno.ENOMEM,
            f"the slab has {total_bytes} bytes free, in {len(self._free)} parts of which the "
            f"largest is {largest_bytes}",
        )

    def put(self, offset_bytes: int, size_bytes: int) -> None:
        """Give a part back."""
        index = bisect.bisect(self._free, (offset_bytes, size_bytes))
        start, end = offset_bytes, offset_bytes + size_bytes
        first = last = index
        if index and sum(self._free[index - 1]) == start:
            first, start = index - 1, self._free[index - 1][0]
        if index < len(self._free) and self._free[index][0] == end:
            last, end = index + 1, sum(self._free[index])
        self._free[first:last] = [(start, end - start)]


class IpcAllocation:
    """A part of the slab."""

    def __init__(self, handle: bytes, offset_bytes: int, size_bytes: int) -> None:
        self.offset_bytes = offset_bytes
        self.size_bytes = size_bytes
        self._handle = handle

    def export(self, *, writable: bool) -> Export:
        """See Allocation. A GPU's mapping is writable in any case."""
        return Export(ipc=IpcPlace(handle=self._handle, offset_bytes=self.offset_bytes))


class IpcArena:
    """See the module's text."""

    page_bytes = 1 << 16

    def __init__(self, ordinal: int, capacity_bytes: int) -> None:
        """Take the slab.

        Raises:
            CudaDriverError: the device has no room for it.
        """
        self.device = device_uuid(ordinal)
        size_bytes = capacity_bytes // self.page_bytes * self.page_bytes
        self._slab = OwnedSlab(ordinal, size_bytes)
        self._extents = Extents(size_bytes)

    def allocate(self, size_bytes: int, name: str, *, zeroed: bool) -> IpcAllocation:
        """See Arena. The slab may have room only in parts that are too small."""
        offset_bytes = self._extents.take(size_bytes)
        if zeroed:
            self._slab.zero(offset_bytes, size_bytes)
        return IpcAllocation(self._slab.handle, offset_bytes, size_bytes)

    def free(self, allocation: Allocation) -> None:
        """See Arena."""
        assert isinstance(allocation, IpcAllocation)
        self._extents.put(allocation.offset_bytes, allocation.size_bytes)
