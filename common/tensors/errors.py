"""What can go wrong between a process and the memory broker."""

from __future__ import annotations

from common.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    RollplexError,
    Stale,
    Unavailable,
)


class StaleLease(Stale):
    """A lease, or the epoch that it belongs to, has ended; the message says when and why."""


class StaleVersion(Stale):
    """A storage is already past the version asked for."""


class UnknownLease(NotFound):
    """This broker never gave out a lease of this number, or forgot its end long ago."""


class UnknownStorage(NotFound):
    """No storage, or no hold, of this number."""


class UnknownRun(NotFound):
    """The run is not open on this node."""


class NotDeclared(FailedPrecondition):
    """The caller is not among the participants that the producer or creator declared."""


class LeaseMisuse(FailedPrecondition):
    """A lease is used in a way that its state does not allow, such as acquired twice."""


class StorageMisuse(FailedPrecondition):
    """A storage is used in a way that its holds do not allow, such as published by a reader."""


class StorageTorn(FailedPrecondition):
    """A writer died or gave up while writing: the contents are undefined until the next publish."""


class StorageMismatch(AlreadyExists):
    """A storage of this name exists with other tensors or other participants."""


class RequestCancelled(FailedPrecondition):
    """The caller took the request back before it was answered."""


class BrokerGone(Unavailable):
    """The connection to the broker has ended; all leases of this process are lost with it."""


class ProtocolViolation(InvalidArgument):
    """A packet that the data-plane protocol does not allow; the connection is closed."""


class BrokerTimeout(DeadlineExceeded):
    """The broker did not grant a request in time; the message says what it waited for."""


class ArenaFull(ResourceExhausted):
    """There is no room and waiting was not wanted or cannot help.

    The message's first line says what was asked; the ledger follows.
    """

    @property
    def ledger(self) -> str:
        """Who holds how many bytes until when, as a table."""
        return str(self).partition("\n")[2]


ERRORS: dict[str, type[RollplexError]] = {
    cls.__name__: cls
    for cls in (
        AlreadyExists,
        ArenaFull,
        BrokerTimeout,
        DeadlineExceeded,
        FailedPrecondition,
        InvalidArgument,
        LeaseMisuse,
        NotDeclared,
        NotFound,
        ProtocolViolation,
        RequestCancelled,
        ResourceExhausted,
        Stale,
        StaleLease,
        StaleVersion,
        StorageMismatch,
        StorageMisuse,
        StorageTorn,
        Unavailable,
        UnknownLease,
        UnknownRun,
        UnknownStorage,
    )
}
"""The errors that the broker may send, by the name they have on the wire."""
