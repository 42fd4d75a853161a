"""The envelope around every event."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.events.bodies import Body
    from common.ids import Epoch, GroupId, Participant, RunId, StepIndex
    from common.step.tasks import Task

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSpan:
    """When the work behind an event ran, on the node's monotonic clock."""

    task: Task
    start_ns: int
    end_ns: int
    sms: int = 0
    """Multiprocessors that it could fill; 0: all of the GPU, or there is none."""
    decode_rate: float = 0.0
    """Rate of the decode beside it over the decode's rate alone; 0: none, or not measured."""


def new_event_id() -> str:
    """A fresh, unique event id."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event in the node's order."""

    sender: Participant
    run_id: RunId
    step: StepIndex
    epoch: Epoch
    body: Body
    group: GroupId | None = None
    """None: about the whole step."""
    work: WorkSpan | None = None
    event_id: str = field(default_factory=new_event_id)
    cause_id: str = ""
    """What led to this; empty: nothing in the order did."""
    seq: int = 0
    """Place in the order; 0: not sequenced yet."""
    schema_version: int = SCHEMA_VERSION
