"""What the state wants done. Each is carried out at once and in order; none answers with an event,
except that a CreateMemory that fails becomes one MemoryFailed, and that SpillMemory and
RestoreMemory are begun at once and end in exactly one MoveEnded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.errors import RollplexError
    from common.ids import Epoch, LeaseId, Participant, RunId
    from common.step.plan import StepPlan
    from common.tensors.spec import TensorSpec
    from services.broker.events import Generation, HoldId, Origin, StorageId


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """Base of all instructions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateMemory(Instruction):
    """Make memory. If that fails, the replies that hand it out become refusals."""

    generation: Generation
    device: str
    size_bytes: int
    name: str
    zeroed: bool
    """Whether its bytes have to be zero. The host's always are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory(Instruction):
    """Let the memory go, and a copy in the host's; whoever has it mapped keeps the pages until
    unmapping, and a copy under way keeps both until its end.
    """

    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillMemory(Instruction):
    """Copy the contents to the host's memory, then give the device's back."""

    generation: Generation
    copied: bool
    """Whether the host's memory has these contents from an earlier time: nothing is copied then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreMemory(Instruction):
    """Make memory of the device as it was, and copy the contents back."""

    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """A piece of memory as a participant gets it."""

    generation: Generation
    device: str
    name: str
    size_bytes: int
    specs: tuple[TensorSpec, ...]
    epoch: Epoch | None
    writable: bool
    life: int = 0
    """How often the contents have come back to the device: each time it is other memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Instruction):
    """Base of the answers to a request."""

    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyAllocated(Reply):
    """The lease is the producer's to fill."""

    lease_id: LeaseId
    handle: Handle


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyAcquired(Reply):
    """All leases asked for, in that order."""

    handles: tuple[Handle, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyStorageOpened(Reply):
    """The storage, new or attached."""

    storage_id: StorageId
    handle: Handle
    created: bool
    version: int | None
    torn: bool
    spillable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHeld(Reply):
    """The hold is granted."""

    hold_id: HoldId
    version: int
    dirty: bool
    handle: Handle | None
    """Of a spillable storage, for whoever had it parked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyDone(Reply):
    """Done, with nothing to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRoom(Reply):
    """What is left of the budget of the participant's device, beyond what waits for room."""

    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse(Reply):
    """The request failed. For a one-way request it ends the session."""

    error: RollplexError


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceStepBegan(Instruction):
    """Tell the node that an epoch began."""

    plan: StepPlan
    lease_room_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceStepAborted(Instruction):
    """Tell the node that an epoch ended without an update."""

    run_id: RunId
    step: int
    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceMemoryWanted(Instruction):
    """Tell the node that a device has no room for a storage that is to come back."""

    device: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceMoved(Instruction):
    """Tell a run's participants that a storage's contents have left its device, or come back."""

    run_id: RunId
    storage: str
    device: str
    restored: bool
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceJoined(Instruction):
    """Tell the node that a participant is there."""

    participant: Participant
    pid: int
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceDied(Instruction):
    """Tell the node that a participant is gone."""

    participant: Participant
    pid: int
    incarnation: str
    reason: str
