"""The broker's data plane on the wire: packets with file descriptors, and what is in them.

One packet is one protobuf message on a Unix SOCK_SEQPACKET socket; descriptors ride beside it.
"""

from __future__ import annotations

import array
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import ErrorCode, InvalidArgument, RemoteError, RollplexError
from common.tensors.errors import ERRORS, ProtocolViolation
from common.tensors.spec import DType, TensorSpec
from protos.rollplex.v1 import common_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MESSAGE_LIMIT_BYTES = 192 * 1024
"""Longest packet. Below Linux's default socket buffer (208 KiB), which an ordinary user cannot
raise; about 2,000 tensors fit."""
FD_LIMIT = 128
"""Most descriptors beside one packet, and so most leases of one request (Linux takes 253)."""

_ANCILLARY_BYTES = socket.CMSG_SPACE(FD_LIMIT * array.array("i").itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """One received packet. Whoever takes it owns its descriptors."""

    data: bytes
    """Empty: the peer has closed the connection."""
    fds: tuple[int, ...]

    def close(self) -> None:
        """Close the descriptors."""
        for fd in self.fds:
            os.close(fd)


def new_socket() -> socket.socket:
    """A non-blocking data-plane socket, not connected."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    return sock


def send_packet(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one packet, whole or not at all.

    Raises:
        BlockingIOError: the peer's buffer is full now.
        OSError: the connection has ended.
    """
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], ancillary)


def receive_packet(sock: socket.socket) -> Packet:
    """Receive one packet.

    Raises:
        BlockingIOError: nothing is there now.
        ProtocolViolation: the packet is longer, or has more descriptors, than the limits.
        OSError: the connection has ended badly.
    """
    data, ancillary, flags, _ = sock.recvmsg(
        MESSAGE_LIMIT_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    packet = Packet(data=data, fds=tuple(fds))
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        packet.close()
        raise ProtocolViolation(
            f"a packet is longer than {MESSAGE_LIMIT_BYTES} bytes or has more than {FD_LIMIT} "
            "file descriptors"
        )
    return packet


def check_size(data: bytes, what: str) -> bytes:
    """Refuse a message that does not fit a packet. Raises InvalidArgument."""
    if len(data) > MESSAGE_LIMIT_BYTES:
        raise InvalidArgument(
            f"{what} takes {len(data)} bytes; a packet holds at most {MESSAGE_LIMIT_BYTES}: "
            "use fewer tensors or shorter names"
        )
    return data


def specs_to_proto(specs: Iterable[TensorSpec]) -> list[common_pb2.TensorSpec]:
    """The wire form of tensor descriptions."""
    return [
        common_pb2.TensorSpec(
            name=spec.name, dtype=spec.dtype, shape=spec.shape, offset_bytes=spec.offset_bytes
        )
        for spec in specs
    ]


def specs_from_proto(messages: Iterable[common_pb2.TensorSpec]) -> tuple[TensorSpec, ...]:
    """Read tensor descriptions. Raises InvalidArgument for a type that is not known."""
    specs = []
    for message in messages:
        try:
            dtype = DType(message.dtype)
        except ValueError:
            raise InvalidArgument(
                f"tensor {message.name} has dtype {message.dtype!r}; legal are {', '.join(DType)}",
                tensor=message.name,
            ) from None
        specs.append(
            TensorSpec(
                name=message.name,
                dtype=dtype,
                shape=tuple(message.shape),
                offset_bytes=message.offset_bytes,
            )
        )
    return tuple(specs)


def error_to_proto(error: RollplexError, *, service: str) -> common_pb2.ErrorDetail:
    """The wire form of an error that `service` raised."""
    return common_pb2.ErrorDetail(
        code=error.code.value,
        type=type(error).__name__,
        message=str(error),
        service=service,
        node=socket.gethostname(),
        pid=os.getpid(),
        retryable=error.retryable,
    )


def error_from_proto(detail: common_pb2.ErrorDetail) -> RollplexError:
    """The error of the sender's type where it is known here, else a RemoteError."""
    if detail.type in ERRORS:
        return ERRORS[detail.type](detail.message)
    try:
        code = ErrorCode(detail.code)
    except ValueError:
        code = ErrorCode.INTERNAL
    return RemoteError(
        detail.message,
        remote_code=code,
        remote_type=detail.type,
        service=detail.service,
        node=detail.node,
        pid=detail.pid,
        remote_retryable=detail.retryable,
    )
