"""Broker memory that lies on a GPU, mapped into this process. Needs no torch."""

from __future__ import annotations

import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

from common.gpu.driver import fill_zero, ordinal_of, permit_during_capture, synchronize
from common.gpu.legacy_ipc import OpenedSlab
from common.gpu.shared_memory import MappedMemory
from common.tensors.parking import Parking
from common.tensors.reaper import REAPER, Departure

if TYPE_CHECKING:
    from protos.rollplex.v1 import broker_pb2 as pb

HOST = "cpu"
"""The device of host memory."""


class DevicePages:
    """Device memory, mapped at a fixed address for as long as this object lives.

    Attributes:
        device: the GPU's UUID.
        ordinal: its number in this process.
        address: of the first byte.
        departure: what happens when this object is gone.
        parking: for a storage that may be spilled. None: shared by a legacy IPC handle.
    """

    def __init__(self, device: str, mapped: MappedMemory | OpenedSlab) -> None:
        self.device = device
        self.ordinal = mapped.ordinal
        self.address = mapped.address
        self.size_bytes = mapped.size_bytes
        self.departure = Departure(mapped)
        self.parking = None
        if isinstance(mapped, MappedMemory):
            self.parking = Parking(_QuietMemory(mapped))
        REAPER.start()
        finalizer = weakref.finalize(self, REAPER.put, self.departure)
        finalizer.atexit = False

    def zero(self) -> None:
        """Set all of it to zero; it is when this returns. Blocks."""
        fill_zero(self.ordinal, self.address, self.size_bytes)


class _QuietMemory:
    """Device memory that is parked when no kernel of this process can use it any more."""

    def __init__(self, mapped: MappedMemory) -> None:
        self._mapped = mapped

    def park(self) -> None:
        """See Parkable."""
        with REAPER.quiet():
            synchronize(self._mapped.ordinal)
            self._mapped.park()

    def restore(self, descriptor: int) -> None:
        """See Parkable."""
        permit_during_capture()
        self._mapped.restore(descriptor)


class DeviceBytes:
    """The bytes of one tensor on a GPU. Keeps them mapped; torch and others read it as it is.

    Attributes:
        ordinal: of the GPU in this process.
        nbytes: may be 0.
    """

    def __init__(self, pages: DevicePages, offset_bytes: int, nbytes: int) -> None:
        self._pages = pages
        self.ordinal = pages.ordinal
        self.nbytes = nbytes
        self.address = pages.address + offset_bytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.nbytes,),
            "data": (self.address, False),
            "strides": None,
            "stream": None,
        }


@cache
def mapper() -> ThreadPoolExecutor:
    """The thread that maps: a mapping takes up to a millisecond, too long for an event loop."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="device-mapper")


_storages: weakref.WeakValueDictionary[int, DevicePages] = weakref.WeakValueDictionary()
"""Storages that are mapped, by generation: opened again they are at the same address, which CUDA
graphs know. A lease is mapped once in any case."""


def map_handle(handle: pb.TensorHandle, descriptor: int | None) -> DevicePages:
    """Map an allocation of the broker. Blocks for about a millisecond.

    Args:
        handle: of a GPU's memory.
        descriptor: that came with it, closed here; None for a legacy IPC handle.

    Raises:
        CudaMissing: the GPU is not visible to this process.
        CudaDriverError: it cannot be mapped.
    """
    try:
        known = _storages.get(handle.generation)
        if known is not None:
            if known.parking is not None and descriptor is not None:
                known.parking.bring_back(handle.life, descriptor)
            return known
        if descriptor is None:
            ipc = handle.ipc
            permit_during_capture()
            ordinal = _ordinal(handle.device)
            slab = OpenedSlab(ordinal, ipc.handle, ipc.offset_bytes, handle.size_bytes)
            pages = DevicePages(handle.device, slab)
        else:
            pages = _map_pages(handle.device, descriptor, handle.size_bytes)
    finally:
        if descriptor is not None:
            os.close(descriptor)
    if pages.parking is not None:
        pages.parking.life = handle.life
    if not handle.epoch:
        _storages[handle.generation] = pages
    return pages


def map_pages(device: str, descriptor: int, size_bytes: int) -> DevicePages:
    """Map shared memory of a GPU by its descriptor, which is closed here. Blocks for about a
    millisecond.

    Raises: as `map_handle` does.
    """
    try:
        return _map_pages(device, descriptor, size_bytes)
    finally:
        os.close(descriptor)


def _map_pages(device: str, descriptor: int, size_bytes: int) -> DevicePages:
    permit_during_capture()
    return DevicePages(device, MappedMemory(_ordinal(device), descriptor, size_bytes))


def mapped_storage(generation: int) -> DevicePages | None:
    """Pages of a storage on a GPU, if this process has any."""
    return _storages.get(generation)


@cache
def _ordinal(device: str) -> int:
    """A GPU's number here; another process may number it otherwise."""
    return ordinal_of(device)
