"""One allocation of the broker, mapped into this process."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Protocol

from common.tensors.device import HOST, DeviceBytes, DevicePages
from common.tensors.errors import LeaseMisuse
from common.tensors.host import HostPages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.tensors.reaper import CudaEvent
    from common.tensors.spec import TensorSpec


class Ending(Protocol):
    """A callback for when a mapping is over: a `weakref.finalize`, or the reaper's."""

    @property
    def alive(self) -> bool:
        """Whether it is still to run."""

    def detach(self) -> object | None:
        """Do not run it. Returns None if it has run, or was detached before."""


class Mapping:
    """The bytes of one allocation, by tensor name.

    The pages stay mapped until the last view of them is gone, whatever happens to the lease: a
    late read gives old bytes, never a crash. Those of a GPU stay longer, until its kernels are
    done with them.
    """

    def __init__(
        self,
        *,
        name: str,
        pages: mmap.mmap | DevicePages,
        specs: Sequence[TensorSpec],
        writable: bool,
    ) -> None:
        self.name = name
        self.specs = {spec.name: spec for spec in specs}
        self.writable = writable
        self.device = pages.device if isinstance(pages, DevicePages) else HOST
        self.departure = pages.departure if isinstance(pages, DevicePages) else None
        self._pages: mmap.mmap | DevicePages | None = pages

    @property
    def parkable(self) -> HostPages | DevicePages | None:
        """Pages that can be taken out of memory; None: they cannot be, or were let go."""
        return self._pages if isinstance(self._pages, HostPages | DevicePages) else None

    @classmethod
    def of_fd(cls, fd: int, *, name: str, size_bytes: int, specs: Sequence[TensorSpec]) -> Mapping:
        """Map a descriptor of host memory and close it. Writable if the descriptor is.

        Raises:
            OSError: the system refuses the mapping.
        """
        try:
            writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            pages = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=protection)
        finally:
            os.close(fd)
        return cls(name=name, pages=pages, specs=specs, writable=writable)

    @property
    def pages(self) -> mmap.mmap | DevicePages:
        """The mapped pages. Raises LeaseMisuse after `drop`."""
        if self._pages is None:
            raise LeaseMisuse(f"{self.name} was let go by this process; its bytes are out of reach")
        return self._pages

    def spec(self, name: str) -> TensorSpec:
        """What the tensor is. Raises LeaseMisuse for a name that is not there."""
        if name not in self.specs:
            raise LeaseMisuse(
                f"{self.name} has no tensor {name}; it has {', '.join(sorted(self.specs))}"
            )
        return self.specs[name]

    def view(self, name: str) -> memoryview:
        """The tensor's bytes: format `B`, one dimension, read-only unless `writable`.

        Raises:
            LeaseMisuse: no such tensor, let go, or not in host memory.
        """
        spec, pages = self.spec(name), self.pages
        if isinstance(pages, DevicePages):
            raise LeaseMisuse(f"{self.name} lies on {self.device}; only tensors can be made of it")
        view = memoryview(pages)[spec.offset_bytes : spec.offset_bytes + spec.nbytes]
        return view if self.writable else view.toreadonly()

    def device_view(self, name: str) -> DeviceBytes:
        """The tensor's bytes on a GPU.

        Raises:
            LeaseMisuse: no such tensor, let go, or not on a GPU.
        """
        spec, pages = self.spec(name), self.pages
        if not isinstance(pages, DevicePages):
            raise LeaseMisuse(f"{self.name} lies in host memory, not on a GPU")
        return DeviceBytes(pages, spec.offset_bytes, spec.nbytes)

    def when_over(self, callback: Callable[[], None]) -> Ending:
        """Run something once when the last view is gone; of a GPU's, when they are unmapped."""
        if self.departure is not None:
            return self.departure.when_over(callback)
        finalizer = weakref.finalize(self.pages, callback)
        finalizer.atexit = False
        return finalizer

    def drop(self, *, after: CudaEvent | None = None) -> None:
        """Forget the pages; they are unmapped when the last view is gone. Idempotent.

        Args:
            after: GPU only: no kernel uses the bytes after this event. It counts if there are no
                views; with some left, or without an event, all GPU work of this process is
                waited for when they are gone.
        """
        pages, self._pages = self._pages, None
        if not isinstance(pages, DevicePages):
            return
        departure, alive = pages.departure, weakref.ref(pages)
        departure.events = None if after is None else (after,)
        del pages
        if alive() is not None:
            departure.events = None
