"""Pinned memory of the host: what a GPU copies to and from at the full speed of its link."""

from __future__ import annotations

from typing import Any

from common.gpu.driver import bindings, call, use_primary_context

PART_BYTES = 1 << 28
"""Pinned at a time. Pinning takes a second for a few GiB, and other calls of the driver wait."""


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
        stream = call("cuStreamCreate", bindings().CUstream_flags.CU_STREAM_NON_BLOCKING)
        try:
            for pointer, part_bytes in self._parts:
                ends = (address, pointer) if to_device else (pointer, address)
                call(name, *ends, part_bytes, stream)
                address += part_bytes
            call("cuStreamSynchronize", stream)
        finally:
            call("cuStreamDestroy", stream)
