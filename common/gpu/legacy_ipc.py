"""Device memory shared by legacy CUDA IPC handles, for drivers without shareable descriptors.

A slab is ordinary device memory of its owner. It must not be freed while another process has it
open, so its owner keeps it until it ends, and hands out parts of it.
"""

from __future__ import annotations

from typing import Any

from common.gpu.driver import bindings, call, fill_zero, use_primary_context


class OwnedSlab:
    """Device memory of this process that others may open. Its contents are undefined."""

    def __init__(self, ordinal: int, size_bytes: int) -> None:
        """Take it. Raises CudaDriverError if the device has no room."""
        use_primary_context(ordinal)
        self._ordinal = ordinal
        self._address: Any = call("cuMemAlloc", size_bytes)
        self.handle = bytes(call("cuIpcGetMemHandle", self._address).reserved)

    def zero(self, offset_bytes: int, size_bytes: int) -> None:
        """Set a part to zero; it is when this returns."""
        fill_zero(self._ordinal, int(self._address) + offset_bytes, size_bytes)


class OpenedSlab:
    """A part of another process's slab at an address of this one.

    The driver counts how often a process opens a slab; all its parts lie at one base address.
    """

    def __init__(self, ordinal: int, handle: bytes, offset_bytes: int, size_bytes: int) -> None:
        """Open it.

        Args:
            handle: `OwnedSlab.handle`.
            offset_bytes, size_bytes: of the part.
        """
        driver = bindings()
        use_primary_context(ordinal)
        raw = driver.CUipcMemHandle()
        raw.reserved = handle
        lazily = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        self.size_bytes = size_bytes
        self.ordinal = ordinal
        self._base: Any = call("cuIpcOpenMemHandle", raw, lazily)
        self._offset_bytes = offset_bytes
        self._open = True

    @property
    def address(self) -> int:
        """Device address of the part's first byte, fixed until `unmap`."""
        return int(self._base) + self._offset_bytes

    def unmap(self) -> None:
        """Take it out of this process. No kernel may use it any more. Idempotent."""
        if self._open:
            self._open = False
            use_primary_context(self.ordinal)
            call("cuIpcCloseMemHandle", self._base)
