"""Errors across a process border: the table of status codes, and both directions."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from common.errors import (
    AlreadyExists,
    DeadlineExceeded,
    ErrorCode,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    RemoteError,
    ResourceExhausted,
    RollplexError,
    Stale,
    Unavailable,
)
from protos.rollplex.v1 import common_pb2 as pb

if TYPE_CHECKING:
    from common.ids import Participant

ERROR_METADATA_KEY = "rollplex-error-bin"
"""Trailing metadata key of the serialised `ErrorDetail`."""

METADATA_LIMIT_BYTES = 64 * 1024
MESSAGE_LIMIT = 16 * 1024
"""Characters of an error text that travel; a ledger table fits, an endless one is cut."""

STATUS: dict[ErrorCode, grpc.StatusCode] = {
    ErrorCode.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorCode.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorCode.FAILED_PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.STALE: grpc.StatusCode.ABORTED,
    ErrorCode.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
}


class RemoteInvalidArgument(RemoteError, InvalidArgument):
    """`InvalidArgument` raised by the peer."""


class RemoteNotFound(RemoteError, NotFound):
    """`NotFound` raised by the peer."""


class RemoteAlreadyExists(RemoteError, AlreadyExists):
    """`AlreadyExists` raised by the peer."""


class RemoteFailedPrecondition(RemoteError, FailedPrecondition):
    """`FailedPrecondition` raised by the peer."""


class RemoteStale(RemoteError, Stale):
    """`Stale` raised by the peer."""


class RemoteResourceExhausted(RemoteError, ResourceExhausted):
    """`ResourceExhausted` raised by the peer."""


class RemoteDeadlineExceeded(RemoteError, DeadlineExceeded):
    """`DeadlineExceeded` raised by the peer."""


class RemoteUnavailable(RemoteError, Unavailable):
    """`Unavailable` raised by the peer: something that it needs is away."""


_REMOTE_TYPES: dict[ErrorCode, type[RemoteError]] = {
    ErrorCode.INVALID_ARGUMENT: RemoteInvalidArgument,
    ErrorCode.NOT_FOUND: RemoteNotFound,
    ErrorCode.ALREADY_EXISTS: RemoteAlreadyExists,
    ErrorCode.FAILED_PRECONDITION: RemoteFailedPrecondition,
    ErrorCode.STALE: RemoteStale,
    ErrorCode.RESOURCE_EXHAUSTED: RemoteResourceExhausted,
    ErrorCode.DEADLINE_EXCEEDED: RemoteDeadlineExceeded,
    ErrorCode.UNAVAILABLE: RemoteUnavailable,
    ErrorCode.INTERNAL: RemoteError,
}


def detail_of(error: Exception, participant: Participant) -> pb.ErrorDetail:
    """The wire form of an error raised in this process."""
    code, retryable = ErrorCode.INTERNAL, False
    if isinstance(error, RollplexError):
        code, retryable = error.code, error.retryable
    text = str(error) or repr(error)
    if len(text) > MESSAGE_LIMIT:
        text = f"{text[:MESSAGE_LIMIT]}… ({len(text)} characters in all)"
    return pb.ErrorDetail(
        code=code.value,
        type=type(error).__name__,
        message=text,
        service=str(participant),
        node=socket.gethostname(),
        pid=os.getpid(),
        retryable=retryable,
    )


def error_from_detail(detail: pb.ErrorDetail) -> RemoteError:
    """The error to raise for one that happened in another process.

    It is a `RemoteError` and, by its code, also the matching class of `common.errors`, so that
    `except Stale` holds for both sides of the border.
    """
    try:
        code = ErrorCode(detail.code)
    except ValueError:
        code = ErrorCode.INTERNAL
    return _REMOTE_TYPES[code](
        detail.message,
        remote_code=code,
        remote_type=detail.type,
        service=detail.service,
        node=detail.node,
        pid=detail.pid,
        remote_retryable=detail.retryable,
    )


def error_from_rpc(error: grpc.aio.AioRpcError, *, address: str, method: str) -> RollplexError:
    """The error to raise for a failed call of `method` at `address`."""
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == ERROR_METADATA_KEY:
            try:
                return error_from_detail(pb.ErrorDetail.FromString(value))
            except DecodeError:
                break
    status, text = error.code(), error.details() or "no details"
    where = f"{method} at {address}"
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{where} gave no answer before its deadline ({text})")
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return Unavailable(f"{where}: the peer is away ({text})")
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return FailedPrecondition(f"{where}: the peer does not serve this method ({text})")
    return RemoteError(
        text,
        remote_code=ErrorCode.INTERNAL,
        remote_type=f"gRPC {status.name}",
        service=address,
        node="unknown node",
        pid=0,
    )
