"""One allocation of the broker, mapped into this process."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import TYPE_CHECKING

from common.tensors.errors import LeaseMisuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.tensors.spec import TensorSpec


class Mapping:
    """The bytes of one allocation, by tensor name.

    The pages stay mapped until the last view of them is gone, whatever happens to the lease: a
    late read gives old bytes, never a crash.
    """

    def __init__(
        self, *, name: str, pages: mmap.mmap, specs: Sequence[TensorSpec], writable: bool
    ) -> None:
        self.name = name
        self.specs = {spec.name: spec for spec in specs}
        self.writable = writable
        self._pages: mmap.mmap | None = pages

    @classmethod
    def of_fd(cls, fd: int, *, name: str, size_bytes: int, specs: Sequence[TensorSpec]) -> Mapping:
        """Map a descriptor and close it. Writable if the descriptor is.

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
    def pages(self) -> mmap.mmap:
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
        """The tensor's bytes: format `B`, one dimension, read-only unless `writable`."""
        spec = self.spec(name)
        return memoryview(self.pages)[spec.offset_bytes : spec.offset_bytes + spec.nbytes]

    def drop(self) -> None:
        """Forget the pages; they are unmapped when the last view is gone. Idempotent."""
        self._pages = None
