"""What happens to the broker: requests of participants, the controller's orders, time.

Every event carries the monotonic time at which it arrived, so that the state needs no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from common.ids import Epoch, GroupId, LeaseId, Participant, RunId
    from common.step.plan import StepPlan
    from common.tensors.spec import Held, Layout, Placement, Residency
    from common.tensors.storage import HoldKind, StorageSpec

SessionId = NewType("SessionId", int)
"""One connection of the data plane."""
RequestId = NewType("RequestId", int)
"""A request of one session; 0: one-way."""
Generation = NewType("Generation", int)
"""One piece of memory; never used twice by one broker, and it names the piece."""
StorageId = NewType("StorageId", int)
HoldId = NewType("HoldId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who asked, and where the answer goes."""

    session: SessionId
    request: RequestId
    participant: Participant


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerEvent:
    """Base of all events."""

    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantConnected(BrokerEvent):
    """A participant joined; it has no other session."""

    session: SessionId
    participant: Participant
    pid: int
    incarnation: str
    device: str
    """GPU that it computes on; empty: the node's first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantLost(BrokerEvent):
    """The session of a participant has ended, and with it the process, as far as leases go."""

    session: SessionId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOpened(BrokerEvent):
    """The controller makes a run known; epochs below `epoch` are over."""

    run_id: RunId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequested(BrokerEvent):
    """The controller begins an epoch."""

    plan: StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequested(BrokerEvent):
    """The controller ends an epoch without an update."""

    run_id: RunId
    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClosed(BrokerEvent):
    """The controller is done with a run."""

    run_id: RunId


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed(BrokerEvent):
    """Time went on; requests that waited too long are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFailed(BrokerEvent):
    """The system did not give the memory of a CreateMemory; its requesters know already."""

    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveEnded(BrokerEvent):
    """Base of how a SpillMemory or a RestoreMemory ends, each in exactly one of these."""

    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySpilled(MoveEnded):
    """The contents are in the host's memory, and the device's is given back."""

    seconds: float
    """What that took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRestored(MoveEnded):
    """The contents are on the device; the host's memory is kept for the next spill."""

    seconds: float
    """What that took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveFailed(MoveEnded):
    """There was no memory to move the contents to; they are whole where they were."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(BrokerEvent):
    """Base of what participants ask."""

    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocateLease(Request):
    """A producer wants memory to fill."""

    run_id: RunId
    epoch: Epoch
    group: GroupId | None
    name: str
    layout: Layout
    placement: Placement
    consumers: tuple[Participant, ...]
    residency: Residency
    next_use: str
    wait: bool
    deadline_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SealLease(Request):
    """A producer has filled its lease."""

    lease_id: LeaseId
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireLeases(Request):
    """A consumer wants to hold leases, all or none."""

    lease_ids: tuple[LeaseId, ...]
    epoch: Epoch
    deadline_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLeases(Request):
    """A consumer no longer needs the bytes."""

    lease_ids: tuple[LeaseId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonLeases(Request):
    """A producer says that nobody will need its leases."""

    lease_ids: tuple[LeaseId, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStorage(Request):
    """Create or attach; `create` is None for attaching only."""

    run_id: RunId
    name: str
    create: StorageSpec | None
    deadline_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldStorage(Request):
    """A hold on a storage is wanted."""

    storage_id: StorageId
    kind: HoldKind
    version: int
    epoch: Epoch
    deadline_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseHold(Request):
    """A hold ends; a WRITE hold that was not `untouched` leaves the storage torn."""

    hold_id: HoldId
    untouched: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishHold(Request):
    """A WRITE hold ends with a new version."""

    hold_id: HoldId


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkStorage(Request):
    """A participant has unmapped a storage, and needs it no more until it asks again."""

    storage_id: StorageId


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchStorage(Request):
    """A participant will hold a storage that it has parked."""

    storage_id: StorageId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveMemory(Request):
    """Memory of a participant's own allocator is to be counted; 0 gives it back."""

    run_id: RunId
    name: str
    placement: Placement
    size_bytes: int
    away_bytes: int = 0
    """That will be reserved beside it in each step."""
    deadline_ns: int | None = None
    """For room; None: it is refused if there is none now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportHeld(Request):
    """How much a participant's process has taken of its device itself; 0: nothing."""

    name: Held
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest(Request):
    """The session takes back one of its waiting requests; nothing if it was answered."""

    cancelled: RequestId
