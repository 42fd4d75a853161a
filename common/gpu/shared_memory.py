"""Device memory that one process owns and others map, through file descriptors.

The owner creates physical memory and exports a descriptor; a mapper imports it and maps it at an
address of its own. The bytes stay until the owner has released and every mapper has unmapped;
then the device has them back.
"""

from __future__ import annotations

from typing import Any

from common.gpu.driver import bindings, call, use_primary_context


def granularity_bytes(ordinal: int) -> int:
    """Sizes are multiples of this."""
    driver = bindings()
    use_primary_context(ordinal)
    flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(call("cuMemGetAllocationGranularity", _properties(ordinal), flag))


class OwnedMemory:
    """Physical device memory of this process, not mapped here."""

    def __init__(self, ordinal: int, size_bytes: int) -> None:
        """Create it. Raises CudaDriverError if the device has no room.

        Args:
            size_bytes: a multiple of `granularity_bytes`.
        """
        use_primary_context(ordinal)
        self.size_bytes = size_bytes
        self._handle: Any = call("cuMemCreate", size_bytes, _properties(ordinal), 0)

    def export(self) -> int:
        """A new file descriptor that others import; the caller closes it."""
        return int(call("cuMemExportToShareableHandle", self._handle, _handle_type(), 0))

    def release(self) -> None:
        """Give it up; it goes back to the device when nobody maps it. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            call("cuMemRelease", handle)


class MappedMemory:
    """Another process's device memory at an address of this one."""

    def __init__(self, ordinal: int, descriptor: int, size_bytes: int) -> None:
        """Import and map.

        Args:
            descriptor: from `OwnedMemory.export`; stays the caller's to close.
            size_bytes: of the whole memory.
        """
        driver = bindings()
        use_primary_context(ordinal)
        self.size_bytes = size_bytes
        handle = call("cuMemImportFromShareableHandle", descriptor, _handle_type())
        try:
            self._address: Any = call("cuMemAddressReserve", size_bytes, 0, 0, 0)
            try:
                call("cuMemMap", self._address, size_bytes, 0, handle, 0)
            except BaseException:
                call("cuMemAddressFree", self._address, size_bytes)
                raise
        finally:
            call("cuMemRelease", handle)
        access = driver.CUmemAccessDesc()
        access.location = _properties(ordinal).location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call("cuMemSetAccess", self._address, size_bytes, [access], 1)
        self._mapped = True

    @property
    def address(self) -> int:
        """Device address of the first byte, fixed until `unmap`."""
        return int(self._address)

    def unmap(self) -> None:
        """Take it out of this process. No kernel may use it any more. Idempotent."""
        if self._mapped:
            self._mapped = False
            call("cuMemUnmap", self._address, self.size_bytes)
            call("cuMemAddressFree", self._address, self.size_bytes)


def _properties(ordinal: int) -> Any:
    driver = bindings()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    properties.requestedHandleTypes = _handle_type()
    return properties


def _handle_type() -> Any:
    types = bindings().CUmemAllocationHandleType
    return types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
