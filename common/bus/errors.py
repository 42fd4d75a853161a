"""Errors of the event bus."""

from __future__ import annotations

from common.errors import InvalidArgument, Stale


class SequenceGap(Stale):
    """Events between the last one seen and the oldest one kept are lost to this subscriber.

    What it knows of the step is incomplete and cannot be completed: it has to start afresh.
    """


class BusRefused(InvalidArgument):
    """The hub could not read an event of this client: another schema version, or a fault."""
