"""The root of every error that Rollplex raises, and the codes that cross processes."""

from __future__ import annotations

from enum import Enum
from typing import Any, ClassVar


class ErrorCode(Enum):
    """What kind of failure this is; one gRPC status code belongs to each."""

    INVALID_ARGUMENT = "invalid_argument"
    """The caller's input is wrong and will stay wrong."""
    NOT_FOUND = "not_found"
    """The named thing does not exist."""
    ALREADY_EXISTS = "already_exists"
    """The named thing exists with other contents."""
    FAILED_PRECONDITION = "failed_precondition"
    """The state does not allow this now."""
    STALE = "stale"
    """A handle, an epoch or a version that has ended."""
    RESOURCE_EXHAUSTED = "resource_exhausted"
    """Memory, slots or a budget is used up; the message has the ledger."""
    DEADLINE_EXCEEDED = "deadline_exceeded"
    """The answer did not come in time."""
    UNAVAILABLE = "unavailable"
    """The peer is away; the same call may succeed later."""
    INTERNAL = "internal"
    """A broken invariant of Rollplex itself."""


class RollplexError(Exception):
    """Base of all errors of this project.

    Attributes:
        code: the kind of failure.
        retryable: whether the same call may succeed later.
        data: named values that the message was made from, all of them JSON scalars.
    """

    code: ClassVar[ErrorCode] = ErrorCode.INTERNAL
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.data: dict[str, Any] = data


class InvalidArgument(RollplexError):
    """An input that names its key, its value and what is legal."""

    code = ErrorCode.INVALID_ARGUMENT


class NotFound(RollplexError):
    """Something asked for by name does not exist."""

    code = ErrorCode.NOT_FOUND


class AlreadyExists(RollplexError):
    """Something with this name exists and differs."""

    code = ErrorCode.ALREADY_EXISTS


class FailedPrecondition(RollplexError):
    """The state does not allow this operation now."""

    code = ErrorCode.FAILED_PRECONDITION


class Stale(RollplexError):
    """A handle, epoch or version whose time has ended; the message says when and why."""

    code = ErrorCode.STALE


class ResourceExhausted(RollplexError):
    """A budget is used up; the message carries who holds what."""

    code = ErrorCode.RESOURCE_EXHAUSTED


class DeadlineExceeded(RollplexError):
    """An answer did not come before its deadline."""

    code = ErrorCode.DEADLINE_EXCEEDED
    retryable = True


class Unavailable(RollplexError):
    """A peer is away for now."""

    code = ErrorCode.UNAVAILABLE
    retryable = True


class ProcessUnusable(Unavailable):
    """This process cannot go on, nor close what it has open: it has to end at once."""


class RemoteError(RollplexError):
    """An error raised in another process, with where it came from.

    Attributes:
        remote_code: the code it had there.
        remote_type: class name of the error there.
        service: participant name, such as ``learner/0``.
        node: host name.
        pid: process id there.
    """

    def __init__(
        self,
        message: str,
        *,
        remote_code: ErrorCode,
        remote_type: str,
        service: str,
        node: str,
        pid: int,
        remote_retryable: bool = False,
    ) -> None:
        super().__init__(f"{remote_type} in {service} (pid {pid} on {node}): {message}")
        self.text = message
        self.remote_code = remote_code
        self.remote_type = remote_type
        self.service = service
        self.node = node
        self.pid = pid
        self.remote_retryable = remote_retryable
