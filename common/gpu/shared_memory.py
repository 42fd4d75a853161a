"""Device memory that one process owns and others map, through file descriptors.

The owner creates physical memory and exports a descriptor; a mapper imports it and maps it at an
address of its own. The bytes stay until the owner has released and every mapper has unmapped;
then the device has them back.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from common.gpu.driver import CudaDriverError, bindings, call, fill_zero, use_primary_context

if TYPE_CHECKING:
    from collections.abc import Iterator


def granularity_bytes(ordinal: int) -> int:
    """Sizes are multiples of this."""
    flag = bindings().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    use_primary_context(ordinal)
    return int(call("cuMemGetAllocationGranularity", _properties(ordinal), flag))


def why_not_shareable(ordinal: int) -> str:
    """Why this GPU's memory cannot be shared by descriptors, in words; empty: it can."""
    use_primary_context(ordinal)
    attributes = bindings().CUdevice_attribute
    device = call("cuDeviceGet", ordinal)
    for attribute in (
        attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    ):
        if not call("cuDeviceGetAttribute", attribute, device):
            return f"the device says no to {attribute.name}"
    try:
        _try_sharing(ordinal)
    except CudaDriverError as error:
        return str(error)
    return ""


def _try_sharing(ordinal: int) -> None:
    """Containers may forbid what the device can do."""
    owned = OwnedMemory(ordinal, granularity_bytes(ordinal))
    try:
        descriptor = owned.export()
        try:
            MappedMemory(ordinal, descriptor, owned.size_bytes).unmap()
        finally:
            os.close(descriptor)
    finally:
        owned.release()


class OwnedMemory:
    """Physical device memory of this process, not mapped here. Its contents are undefined."""

    def __init__(self, ordinal: int, size_bytes: int) -> None:
        """Create it. Raises CudaDriverError if the device has no room.

        Args:
            size_bytes: a multiple of `granularity_bytes`.
        """
        use_primary_context(ordinal)
        self.size_bytes = size_bytes
        self._ordinal = ordinal
        self._handle: Any = call("cuMemCreate", size_bytes, _properties(ordinal), 0)

    def export(self) -> int:
        """A new file descriptor that others import; the caller closes it."""
        return int(call("cuMemExportToShareableHandle", self._handle, _handle_type(), 0))

    def zero(self) -> None:
        """Set it to zero; it is when this returns."""
        with self.mapped() as address:
            fill_zero(self._ordinal, address, self.size_bytes)

    @contextmanager
    def mapped(self) -> Iterator[int]:
        """Its address in this process, inside the block. No GPU work may outlast the block."""
        use_primary_context(self._ordinal)
        address = _reserve(self.size_bytes)
        try:
            _map(self._ordinal, address, self._handle, self.size_bytes)
            try:
                yield int(address)
            finally:
                use_primary_context(self._ordinal)
                call("cuMemUnmap", address, self.size_bytes)
        finally:
            call("cuMemAddressFree", address, self.size_bytes)

    def release(self) -> None:
        """Give it up; it goes back to the device when nobody maps it. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            call("cuMemRelease", handle)


class MappedMemory:
    """Another process's device memory at an address of this one.

    `park` takes the memory out and keeps the address; `restore` puts memory there again. Both are
    not to be called beside each other or beside `unmap`.
    """

    def __init__(self, ordinal: int, descriptor: int, size_bytes: int) -> None:
        """Import and map.

        Args:
            descriptor: from `OwnedMemory.export`; stays the caller's to close.
            size_bytes: of the whole memory.
        """
        use_primary_context(ordinal)
        self.size_bytes = size_bytes
        self.ordinal = ordinal
        self._mapped = False
        self._address: Any = _reserve(size_bytes)
        self._reserved = True
        try:
            self.restore(descriptor)
        except BaseException:
            self.unmap()
            raise

    @property
    def address(self) -> int:
        """Device address of the first byte, fixed until `unmap`."""
        return int(self._address)

    def park(self) -> None:
        """Take the memory out; the address stays. No kernel may use it any more. Idempotent."""
        if self._mapped:
            self._mapped = False
            use_primary_context(self.ordinal)
            call("cuMemUnmap", self._address, self.size_bytes)

    def restore(self, descriptor: int) -> None:
        """Import memory of the same size and map it at the address, where none is.

        Args:
            descriptor: from `OwnedMemory.export`; stays the caller's to close.
        """
        use_primary_context(self.ordinal)
        handle = call("cuMemImportFromShareableHandle", descriptor, _handle_type())
        try:
            _map(self.ordinal, self._address, handle, self.size_bytes)
        finally:
            call("cuMemRelease", handle)
        self._mapped = True

    def unmap(self) -> None:
        """Give up memory and address. No kernel may use it any more. Idempotent."""
        self.park()
        if self._reserved:
            self._reserved = False
            use_primary_context(self.ordinal)
            call("cuMemAddressFree", self._address, self.size_bytes)


def _reserve(size_bytes: int) -> Any:
    """An address for memory to be mapped at. The context is current."""
    return call("cuMemAddressReserve", size_bytes, 0, 0, 0)


def _map(ordinal: int, address: Any, handle: Any, size_bytes: int) -> None:
    """Map physical memory for reading and writing. The context is current."""
    driver = bindings()
    call("cuMemMap", address, size_bytes, 0, handle, 0)
    try:
        access = driver.CUmemAccessDesc()
        access.location = _properties(ordinal).location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call("cuMemSetAccess", address, size_bytes, [access], 1)
    except BaseException:
        call("cuMemUnmap", address, size_bytes)
        raise


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
