"""Where the broker's memory comes from.

An arena makes pieces of memory that other processes can map, and takes them back. It keeps no
books: how much may be handed out is the state's business.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Protocol

_NAME_LIMIT = 200
"""Linux allows 249 bytes in a memfd's name."""


class Allocation(Protocol):
    """One piece of memory."""

    @property
    def size_bytes(self) -> int:
        """Its size, whole pages."""

    def export(self, *, writable: bool) -> int:
        """A new descriptor by which another process maps it. The caller closes it."""


class Arena(Protocol):
    """A source of memory on one device."""

    @property
    def device(self) -> str:
        """``cpu``, or a GPU's UUID; never an ordinal, which differs between processes."""

    @property
    def page_bytes(self) -> int:
        """Sizes are multiples of this."""

    def allocate(self, size_bytes: int, name: str) -> Allocation:
        """Zeroed memory.

        Args:
            size_bytes: a multiple of `page_bytes`, not 0.
            name: tensor class, for whoever looks at the process from outside.

        Raises:
            OSError: the system has none, or no descriptor for it.
        """

    def free(self, allocation: Allocation) -> None:
        """Let it go. The pages live on while some process has them mapped."""


class MemfdAllocation:
    """Anonymous shared memory behind one descriptor, sealed against a change of size."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self.size_bytes = size_bytes

    def export(self, *, writable: bool) -> int:
        """See Allocation. A read-only descriptor cannot be mapped for writing by any means."""
        if writable:
            return fcntl.fcntl(self._fd, fcntl.F_DUPFD_CLOEXEC, 0)
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)


class MemfdArena:
    """Host memory, one memfd an allocation; the size of /dev/shm does not matter."""

    device = "cpu"
    page_bytes = mmap.PAGESIZE

    def allocate(self, size_bytes: int, name: str) -> MemfdAllocation:
        """See Arena. Pages are taken from the system when they are first touched."""
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
