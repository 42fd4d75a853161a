"""Where the broker's memory comes from.

An arena makes pieces of memory that other processes can map, and takes them back. One that spills
also copies their contents to the host's memory, which nobody else can map, and back. It keeps no
books: how much may be handed out is the state's business.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME_LIMIT = 200
"""Linux allows 249 bytes in a memfd's name."""
_PART_BYTES = 1 << 24


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


class HostCopy(Protocol):
    """Memory of the host for the contents of one allocation."""

    @property
    def size_bytes(self) -> int:
        """Its size."""

    def free(self) -> None:
        """Give it up. Blocks; any thread."""


@runtime_checkable
class SpillingArena(Arena, Protocol):
    """An arena whose allocations can be spilled.

    These methods may be called from any thread. They block for as long as the copy takes, and keep
    nobody else from working meanwhile.
    """

    def new_copy(self, size_bytes: int) -> HostCopy:
        """Memory of the host, to be used again and again.

        Raises:
            OSError: the system has none.
        """

    def write_out(self, allocation: Allocation, copy: HostCopy) -> None:
        """Copy an allocation's contents to the host; nobody changes them meanwhile."""

    def read_back(self, copy: HostCopy, name: str) -> Allocation:
        """A new allocation with the contents of a copy.

        Raises:
            OSError: the device has no memory for it now.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetedArena:
    """An arena, and how much of it may be handed out and reserved."""

    arena: Arena
    capacity_bytes: int
    limit_bytes: int | None = None
    """For what is handed out and what processes hold themselves, together; None: the latter keeps
    nothing back."""
    context_bytes: int = 0
    """This process's own CUDA context on the device."""


class MemfdAllocation:
    """Anonymous shared memory behind one descriptor, sealed against a change of size."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes

    def export(self, *, writable: bool) -> Export:
        """See Allocation. A read-only descriptor cannot be mapped for writing by any means."""
        if writable:
            return Export(fd=fcntl.fcntl(self.fd, fcntl.F_DUPFD_CLOEXEC, 0))
        return Export(fd=os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


class PrivateMemory:
    """Anonymous memory of this process; see HostCopy."""

    def __init__(self, size_bytes: int) -> None:
        """Take it. Raises OSError if the system has none."""
        self.size_bytes = size_bytes
        self._pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def fill_from(self, fd: int) -> None:
        """Read all of a file of this size."""
        self._in_parts(lambda part, offset_bytes: os.preadv(fd, [part], offset_bytes))

    def write_to(self, fd: int) -> None:
        """Write all of it into a file."""
        self._in_parts(lambda part, offset_bytes: os.pwrite(fd, part, offset_bytes))

    def free(self) -> None:
        """See HostCopy."""
        self._pages.close()

    def _in_parts(self, move: Callable[[memoryview, int], int]) -> None:
        """One system call a part, without the interpreter's lock."""
        offset_bytes = 0
        with memoryview(self._pages) as view:
            while offset_bytes < self.size_bytes:
                with view[offset_bytes : offset_bytes + _PART_BYTES] as part:
                    offset_bytes += move(part, offset_bytes)


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

    def new_copy(self, size_bytes: int) -> PrivateMemory:
        """See SpillingArena."""
        return PrivateMemory(size_bytes)

    def write_out(self, allocation: Allocation, copy: HostCopy) -> None:
        """See SpillingArena."""
        assert isinstance(allocation, MemfdAllocation)
        assert isinstance(copy, PrivateMemory)
        copy.fill_from(allocation.fd)

    def read_back(self, copy: HostCopy, name: str) -> MemfdAllocation:
        """See SpillingArena."""
        assert isinstance(copy, PrivateMemory)
        allocation = self.allocate(copy.size_bytes, name, zeroed=False)
        try:
            copy.write_to(allocation.fd)
        except OSError:
            self.free(allocation)
            raise
        return allocation
