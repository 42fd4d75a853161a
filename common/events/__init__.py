"""Typed events of a node; protobuf only at the border."""

from common.events.codec import UnknownEvent, event_from_proto, event_to_proto
from common.events.event import SCHEMA_VERSION, Event, WorkSpan, new_event_id

__all__ = [
    "SCHEMA_VERSION",
    "Event",
    "UnknownEvent",
    "WorkSpan",
    "event_from_proto",
    "event_to_proto",
    "new_event_id",
]
