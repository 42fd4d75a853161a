"""Host memory of a spillable storage, mapped into this process at an address that stays.

The address space is reserved as anonymous memory, which Python owns and which every view keeps; the
broker's pages are laid over it, taken away, and laid over it again. So nothing of this process
refers to pages that are taken away, not even a descriptor.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os

from common.tensors.parking import Parking

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
"""Both as on every Linux; Python has no names for them."""
_NO_ACCESS = 0
_FAILED = ctypes.c_void_p(-1).value


class _Range:
    """A range of this process's addresses that belongs to a `HostPages`; see Parkable."""

    def __init__(self, address: int, size_bytes: int, *, writable: bool) -> None:
        self._address = address
        self._size_bytes = size_bytes
        self._access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)

    def park(self) -> None:
        """Leave addresses that nothing may touch."""
        self._lay(_NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)

    def restore(self, descriptor: int) -> None:
        """Lay a memfd's pages over it."""
        self._lay(self._access, mmap.MAP_SHARED, descriptor)

    def _lay(self, access: int, flags: int, descriptor: int) -> None:
        place = _mmap()(self._address, self._size_bytes, access, flags | _MAP_FIXED, descriptor, 0)
        if place == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"{self._size_bytes} bytes not mapped: {os.strerror(number)}")


class HostPages(mmap.mmap):
    """Pages of one storage, for as long as this object or a view of it lives."""

    parking: Parking

    @classmethod
    def of_fd(cls, descriptor: int, size_bytes: int, *, writable: bool) -> HostPages:
        """Map a memfd, which stays the caller's. Raises OSError if the system refuses."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        pages = cls(-1, size_bytes, flags=flags)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        place = _Range(address, size_bytes, writable=writable)
        place.restore(descriptor)
        pages.parking = Parking(place)
        return pages


@functools.cache
def _mmap() -> ctypes._NamedFuncPointer:
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    return call
