"""Where the broker's memory comes from.

An arena makes pieces of memory that other processes can map, and takes them back. It keeps no
books: how much may be handed out is the state's business.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import Protocol

_NAME_LIMIT = 200
"""Linux allows 249 bytes in a memfd's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcPlace:
    """Where an allocation lies in memory that is shared by a legacy CUDA IPC handle."""

    handle: bytes
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """By what another process maps an allocation: exactly one of the two."""

    fd: int | None = None
    """A new descriptor; the caller closes it."""
    ipc: IpcPlace | None = None


class Allocation(Protocol):
    """One piece of memory."""

    @property
    def size_bytes(self) -> int:
        """Its size, whole pages."""

    def export(self, *, writable: bool) -> Export:
        """A way for another process to map it.

        Raises:
            OSError: the system has no descriptor for it.
        """


class Arena(Protocol):
    """A source of memory on one device."""

    @property
    def device(self) -> str:
        """``cpu``, or a GPU's UUID; never an ordinal, which differs between processes."""

    @property
    def page_bytes(self) -> int:
        """Sizes are multiples of this."""

    def allocate(self, size_bytes: int, name: str, *, zeroed: bool) -> Allocation:
        """Memory for others to map.

        Args:
            size_bytes: a multiple of `page_bytes`, not 0.
            name: tensor class, for whoever looks at the process from outside.
            zeroed: whether its bytes have to be zero; without it they are undefined.

        Raises:
            OSError: the system has none, or no descriptor for it.
        """

    def free(self, allocation: Allocation) -> None:
        """Let it go. The pages live on while some process has them mapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetedArena:
    """An arena, and how much of it may be handed out and reserved."""

    arena: Arena
    capacity_bytes: int


class MemfdAllocation:
    """Anonymous shared memory behind one descriptor, sealed against a change of size."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self.size_bytes = size_bytes

    def export(self, *, writable: bool) -> Export:
        """See Allocation. A read-only descriptor cannot be mapped for writing by any means."""
        if writable:
            return Export(fd=fcntl.fcntl(self._fd, fcntl.F_DUPFD_CLOEXEC, 0))
        return Export(fd=os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)


class MemfdArena:
    """Host memory, one memfd an allocation; the size of /dev/shm does not matter."""

    device = "cpu"
    page_bytes = mmap.PAGESIZE

    def allocate(self, size_bytes: int, name: str, *, zeroed: bool) -> MemfdAllocation:
        """See Arena; always zeroed. Pages are taken from the system when first touched."""
        label = f"rollplex:{name}".encode()[:_NAME_LIMIT].decode(errors="ignore")
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        except OSError:
            os.close(fd)
            raise
        return MemfdAllocation(fd, size_bytes)

    def free(self, allocation: Allocation) -> None:
        """See Arena."""
        assert isinstance(allocation, MemfdAllocation)
        allocation.close()
