"""From the broker's answers to mappings: host memory at once, a GPU's beside the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from common.tensors.device import HOST, map_handle, mapper
from common.tensors.errors import LeaseMisuse
from common.tensors.mapping import Mapping
from common.tensors.wire import Packet, specs_from_proto

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.tensors.connection import Answer
    from protos.rollplex.v1 import broker_pb2 as pb


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
    loop = asyncio.get_running_loop()
    mapping = loop.run_in_executor(mapper(), lambda: _map_all(answer.fds, handles, zero=zero))
    try:
        # A job that was cancelled before it began would leave the descriptors open.
        return await asyncio.shield(mapping)
    except asyncio.CancelledError:
        mapping.add_done_callback(_forget)
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


def _forget(mapping: asyncio.Future[list[Mapping]]) -> None:
    """Nobody wants the result; its error, if it has one, would be complained about."""
    if not mapping.cancelled():
        mapping.exception()
