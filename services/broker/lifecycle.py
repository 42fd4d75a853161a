"""The life of one lease: its states, the moves between them, and what is remembered of its end."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from common.actor.machine import StateCell, TransitionTable
from common.tensors.errors import StaleLease, UnknownLease
from services.broker.instructions import Handle
from services.broker.ledger import LedgerRow, names

if TYPE_CHECKING:
    from common.ids import Epoch, GroupId, LeaseId, Participant, RunId
    from common.tensors.spec import Residency, TensorSpec
    from services.broker.events import Generation


class LeaseState(StrEnum):
    """Where a lease is in its life."""

    ALLOCATED = "allocated"
    """The producer fills it. In the book's live leases; acquirers wait."""
    SEALED = "sealed"
    """Its contents are final. In the live leases; consumers acquire and release it."""
    DRAINING = "draining"
    """It has ended but somebody still has it mapped. In the live leases, refused to everybody; its
    bytes count until the last holder lets go or dies."""
    FREED = "freed"
    """Its bytes are given back. Only its tombstone is left."""


TRANSITIONS = TransitionTable(
    "lease",
    {
        (LeaseState.ALLOCATED, LeaseState.SEALED): "the producer seals it",
        (LeaseState.ALLOCATED, LeaseState.DRAINING): "its epoch ends while the producer fills it",
        (LeaseState.ALLOCATED, LeaseState.FREED): (
            "the producer abandons it or dies, or the system has no memory"
        ),
        (LeaseState.SEALED, LeaseState.DRAINING): (
            "its epoch ends or the producer abandons it, while consumers hold it"
        ),
        (LeaseState.SEALED, LeaseState.FREED): (
            "the last consumer releases it, or it ends while nobody holds it"
        ),
        (LeaseState.DRAINING, LeaseState.FREED): "the last holder lets go or dies",
    },
)


@dataclass(slots=True, kw_only=True)
class Lease:
    """A live lease. `book.LeaseBook` alone changes it."""

    lease_id: LeaseId
    generation: Generation
    run_id: RunId
    epoch: Epoch
    group: GroupId | None
    name: str
    specs: tuple[TensorSpec, ...]
    device: str
    size_bytes: int
    """Whole pages."""
    producer: Participant
    consumers: tuple[Participant, ...]
    residency: Residency
    next_use: str
    cell: StateCell[LeaseState] = field(init=False)
    filling: bool = True
    """Whether the producer still has it mapped for writing."""
    holders: set[Participant] = field(default_factory=set)
    """Consumers that hold it now."""
    acquired: set[Participant] = field(default_factory=set)
    """Consumers that hold or held it."""
    ended: str = ""
    """Why it ended; empty: it has not."""

    def __post_init__(self) -> None:
        key = f"{self.lease_id} ({self.name} of {self.producer}, epoch {self.epoch})"
        self.cell = StateCell(TRANSITIONS, key, LeaseState.ALLOCATED)

    @property
    def state(self) -> LeaseState:
        """Where it is in its life."""
        return self.cell.state

    @property
    def waiting_for(self) -> tuple[Participant, ...]:
        """Consumers that have not released it yet, in the order declared."""
        return tuple(
            consumer
            for consumer in self.consumers
            if consumer in self.holders or consumer not in self.acquired
        )

    @property
    def mapped_by(self) -> tuple[Participant, ...]:
        """Whoever still has it mapped."""
        filling = {self.producer} if self.filling else set()
        return tuple(sorted(filling | self.holders, key=str))

    def tell(self, at_ns: int, text: str) -> None:
        """Add to the story that an InvalidTransition tells."""
        self.cell.story.add(f"{at_ns / 1e9:.6f} s: {text}")

    def move(self, to: LeaseState, why: str, *, at_ns: int) -> None:
        """Change the state. Raises InvalidTransition with the story."""
        self.cell.move(to, f"{at_ns / 1e9:.6f} s: {why}")

    def handle(self, *, writable: bool) -> Handle:
        """What a participant needs to map it."""
        return Handle(
            generation=self.generation,
            device=self.device,
            name=self.name,
            size_bytes=self.size_bytes,
            specs=self.specs,
            epoch=self.epoch,
            writable=writable,
        )

    def row(self) -> LedgerRow:
        """Its line in the ledger."""
        return LedgerRow(
            name=self.name,
            run_id=self.run_id,
            lease_id=self.lease_id,
            epoch=self.epoch,
            group=self.group,
            device=self.device,
            size_bytes=self.size_bytes,
            producer=self.producer,
            waiting_for=self.waiting_for,
            holders=self.mapped_by,
            state=self.state,
            residency=self.residency,
            until=self._until(),
            generation=self.generation,
        )

    def _until(self) -> str:
        if self.state is LeaseState.DRAINING:
            return f"{names(self.mapped_by)} let go ({self.ended})"
        use = f" after {self.next_use}" if self.next_use else ""
        sealed = f"{self.producer} seals it, " if self.state is LeaseState.ALLOCATED else ""
        return f"{sealed}{names(self.waiting_for)} released it{use}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tombstone:
    name: str
    epoch: Epoch
    at_ns: int
    reason: str


class Tombstones:
    """The ends of the newest leases, so that a late use can be told what happened."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._stones: OrderedDict[LeaseId, _Tombstone] = OrderedDict()

    def add(self, lease: Lease, *, at_ns: int) -> None:
        """Remember an end; the oldest one is forgotten."""
        self._stones[lease.lease_id] = _Tombstone(
            name=lease.name, epoch=lease.epoch, at_ns=at_ns, reason=lease.ended
        )
        while len(self._stones) > self._limit:
            self._stones.popitem(last=False)

    def __contains__(self, lease_id: LeaseId) -> bool:
        return lease_id in self._stones

    def error(
        self, lease_id: LeaseId, *, next_id: LeaseId, at_ns: int
    ) -> StaleLease | UnknownLease:
        """What to tell someone who uses a lease that is not live."""
        if not 0 < lease_id < next_id:
            return UnknownLease(
                f"lease {lease_id} was never given out by this broker; its newest is "
                f"{next_id - 1} (a broker that was restarted does not know older leases)",
                lease_id=lease_id,
            )
        stone = self._stones.get(lease_id)
        if stone is None:
            return StaleLease(
                f"lease {lease_id} ended long ago; the reasons of the newest {self._limit} ends "
                "are kept",
                lease_id=lease_id,
            )
        ago_s = (at_ns - stone.at_ns) / 1e9
        return StaleLease(
            f"lease {lease_id} ({stone.name} of epoch {stone.epoch}) ended {ago_s:.3f} s ago: "
            f"{stone.reason}",
            lease_id=lease_id,
        )
