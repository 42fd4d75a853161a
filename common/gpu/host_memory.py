"""Pinned memory of the host: what a GPU copies to and from at the full speed of its link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.gpu.driver import bindings, call, use_primary_context

if TYPE_CHECKING:
    from collections.abc import Iterator

PART_BYTES = 1 << 28
"""Pinned at a time. Pinning takes a second for a few GiB, and other calls of the driver wait."""
SLICE_BYTES = 1 << 24
"""Copied at a time. With all copies queued at once, forwards of other processes that had to map
memory ended only with the last copy."""
QUEUED_SLICES = 2


class PinnedMemory:
    """Pinned memory of this process, for the contents of one piece of device memory.

    Its methods block, without the interpreter's lock; any thread, one at a time.
    """

    def __init__(self, ordinal: int, size_bytes: int) -> None:
        """Take it. Raises CudaDriverError if the system has none.

        Args:
            ordinal: of the GPU that copies.
        """
        use_primary_context(ordinal)
        self.size_bytes = size_bytes
        self._ordinal = ordinal
        self._parts: list[tuple[Any, int]] = []
        try:
            for offset_bytes in range(0, size_bytes, PART_BYTES):
                part_bytes = min(PART_BYTES, size_bytes - offset_bytes)
                self._parts.append((call("cuMemHostAlloc", part_bytes, 0), part_bytes))
        except BaseException:
            self.free()
            raise

    def fill_from(self, address: int) -> None:
        """Copy device memory of the same size here.

        Args:
            address: where it is mapped in this process.
        """
        self._copy("cuMemcpyDtoHAsync", address, to_device=False)

    def write_to(self, address: int) -> None:
        """Copy all of it to device memory of the same size; see `fill_from`."""
        self._copy("cuMemcpyHtoDAsync", address, to_device=True)

    def free(self) -> None:
        """Give it up. Idempotent."""
        use_primary_context(self._ordinal)
        while self._parts:
            pointer, _ = self._parts.pop()
            call("cuMemFreeHost", pointer)

    def _copy(self, name: str, address: int, *, to_device: bool) -> None:
        use_primary_context(self._ordinal)
        driver = bindings()
        stream = call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        sleeping = driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC
        events = [call("cuEventCreate", sleeping) for _ in range(QUEUED_SLICES)]
        try:
            for number, (offset, pointer, size) in enumerate(self._slices()):
                event = events[number % QUEUED_SLICES]
                call("cuEventSynchronize", event)
                here = address + offset
                ends = (here, pointer) if to_device else (pointer, here)
                call(name, *ends, size, stream)
                call("cuEventRecord", event, stream)
            call("cuStreamSynchronize", stream)
        finally:
            for event in events:
                call("cuEventDestroy", event)
            call("cuStreamDestroy", stream)

    def _slices(self) -> Iterator[tuple[int, int, int]]:
        """Offset in the whole, address, and size of each piece that is copied at a time."""
        offset = 0
        for pointer, part_bytes in self._parts:
            for begin in range(0, part_bytes, SLICE_BYTES):
                size = min(SLICE_BYTES, part_bytes - begin)
                yield offset + begin, int(pointer) + begin, size
            offset += part_bytes
