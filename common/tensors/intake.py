"""From the broker's answers to mappings: host memory at once, a GPU's beside the event loop."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from common.tensors.device import HOST, DevicePages, map_handle, mapper
from common.tensors.errors import LeaseMisuse
from common.tensors.host import HostPages
from common.tensors.mapping import Mapping
from common.tensors.wire import Packet, specs_from_proto

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping, Sequence

    from common.tensors.connection import Answer
    from common.tensors.spec import TensorSpec
    from protos.rollplex.v1 import broker_pb2 as pb

T = TypeVar("T")


async def map_all(
    answer: Answer, handles: Sequence[pb.TensorHandle], *, zero: bool = False
) -> list[Mapping]:
    """Map the memory of an answer; all its descriptors are closed, also if one fails.

    Args:
        handles: of the answer.
        zero: fill memory of a GPU with zeros.

    Raises:
        LeaseMisuse: the broker sent more or fewer descriptors than the handles need.
        OSError, CudaDriverError: one cannot be mapped; none is then.
    """
    wanted = sum(not handle.HasField("ipc") for handle in handles)
    if len(answer.fds) != wanted:
        Packet(data=b"", fds=answer.fds).close()
        raise LeaseMisuse(f"the broker sent {len(answer.fds)} descriptors, not {wanted}")
    if all(handle.device == HOST for handle in handles):
        return _map_all(answer.fds, handles, zero=zero)
    return await _in_mapper(lambda: _map_all(answer.fds, handles, zero=zero))


async def map_storage(
    answer: Answer, opened: pb.StorageOpened, known: MutableMapping[int, HostPages]
) -> Mapping:
    """Map a storage, once a process if it may be spilled.

    Args:
        known: spillable storages in host memory that are mapped, by generation; added to.

    Raises: as `map_all` does.
    """
    handle = opened.handle
    if handle.device != HOST or not opened.spillable or len(answer.fds) != 1:
        (mapping,) = await map_all(answer, [handle])
        return mapping
    (descriptor,) = answer.fds
    pages = known.get(handle.generation)
    try:
        if pages is None:
            pages = HostPages.of_fd(descriptor, handle.size_bytes, writable=handle.writable)
            pages.parking.life = handle.life
            known[handle.generation] = pages
        else:
            pages.parking.bring_back(handle.life, descriptor)
    finally:
        os.close(descriptor)
    specs = specs_from_proto(handle.tensors)
    return Mapping(name=handle.name, pages=pages, specs=specs, writable=handle.writable)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """Memory of one storage, not mapped.

    Attributes:
        descriptor: to be closed by its owner.
        device: `cpu`, or a GPU's UUID.
        size_bytes: of the whole allocation.
        specs: the tensors in it.
    """

    descriptor: int
    device: str
    size_bytes: int
    specs: tuple[TensorSpec, ...]


def shared_memory(answer: Answer) -> SharedMemory:
    """The memory of a storage that was opened.

    Raises: LeaseMisuse if it may be spilled, or has no descriptor.
    """
    opened = answer.reply.storage_opened
    if opened.spillable or len(answer.fds) != 1:
        Packet(data=b"", fds=answer.fds).close()
        raise LeaseMisuse(
            f"{opened.handle.name} cannot be mapped by a child process: it may be spilled "
            f"(here: {opened.spillable}), or the node shares memory by legacy IPC handles"
        )
    return SharedMemory(
        descriptor=answer.fds[0],
        device=opened.handle.device,
        size_bytes=opened.handle.size_bytes,
        specs=tuple(specs_from_proto(opened.handle.tensors)),
    )


async def bring_back(answer: Answer, pages: HostPages | DevicePages | None) -> None:
    """Map what a hold's answer brought, where it was; the descriptor is closed.

    Args:
        pages: of the storage; None: this process has let it go.

    Raises:
        OSError, CudaDriverError: it cannot be mapped.
    """
    life = answer.reply.storage_held.handle.life

    def job() -> None:
        try:
            if pages is not None and pages.parking is not None and answer.fds:
                pages.parking.bring_back(life, answer.fds[0])
        finally:
            Packet(data=b"", fds=answer.fds).close()

    if isinstance(pages, DevicePages):
        await _in_mapper(job)
    else:
        job()


async def _in_mapper(job: Callable[[], T]) -> T:
    running = asyncio.get_running_loop().run_in_executor(mapper(), job)
    try:
        # A job that was cancelled before it began would leave the descriptors open.
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        running.add_done_callback(_forget)
        raise


def _map_all(
    descriptors: Sequence[int], handles: Sequence[pb.TensorHandle], *, zero: bool
) -> list[Mapping]:
    left = deque(descriptors)
    try:
        return [_map(handle, left, zero=zero) for handle in handles]
    finally:
        Packet(data=b"", fds=tuple(left)).close()


def _map(handle: pb.TensorHandle, left: deque[int], *, zero: bool) -> Mapping:
    specs = specs_from_proto(handle.tensors)
    if handle.device == HOST:
        return Mapping.of_fd(
            left.popleft(), name=handle.name, size_bytes=handle.size_bytes, specs=specs
        )
    pages = map_handle(handle, None if handle.HasField("ipc") else left.popleft())
    if zero:
        pages.zero()
    return Mapping(name=handle.name, pages=pages, specs=specs, writable=handle.writable)


def _forget(running: asyncio.Future[Any]) -> None:
    """Nobody wants the result; its error, if it has one, would be complained about."""
    if not running.cancelled():
        running.exception()
