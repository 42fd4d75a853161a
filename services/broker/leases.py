"""All step-scoped leases, and the consumers that wait for a seal.

Invariants: a live lease is in no tombstone; a consumer never waits for and holds the same lease;
every lease that someone waits for is ALLOCATED or waited for together with one that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import InvalidArgument, RollplexError
from common.ids import LeaseId
from common.tensors.errors import BrokerTimeout, LeaseMisuse, NotDeclared, StaleLease
from common.tensors.wire import FD_LIMIT
from services.broker.instructions import (
    CreateMemory,
    FreeMemory,
    Refuse,
    ReplyAcquired,
    ReplyAllocated,
)
from services.broker.ledger import LedgerRow, names
from services.broker.lifecycle import Lease, LeaseState, Tombstones
from services.broker.room import RoomRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from common.ids import Epoch, Participant, RunId
    from services.broker.events import AcquireLeases, AllocateLease, Generation, Origin, SealLease
    from services.broker.outbox import Outbox
    from services.broker.rooms import Rooms
    from services.broker.runs import Runs

TOMBSTONES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """An acquire that waits for seals."""

    origin: Origin
    lease_ids: tuple[LeaseId, ...]
    deadline_ns: int


class LeaseBook:
    """See the module's text."""

    def __init__(self, *, runs: Runs, rooms: Rooms, outbox: Outbox) -> None:
        self._runs = runs
        self._rooms = rooms
        self._outbox = outbox
        self._leases: dict[LeaseId, Lease] = {}
        self._waiting: list[_Waiting] = []
        self._tombstones = Tombstones(limit=TOMBSTONES)
        self._next_id = LeaseId(1)

    def rows(self) -> list[LedgerRow]:
        """One row a live lease."""
        return [lease.row() for lease in self._leases.values()]

    def states(self) -> dict[LeaseId, LeaseState]:
        """The states of the live leases."""
        return {lease_id: lease.state for lease_id, lease in self._leases.items()}

    def deadlines(self) -> list[int]:
        """When waiting acquires have to be refused."""
        return [waiting.deadline_ns for waiting in self._waiting]

    def allocate(self, event: AllocateLease) -> None:
        """Grant, queue or refuse."""
        self._runs.require_current(event.run_id, event.epoch)
        if not event.consumers or len(set(event.consumers)) < len(event.consumers):
            raise InvalidArgument(
                f"lease {event.name} declares the consumers [{names(event.consumers)}]; it needs "
                "at least one, and each only once"
            )
        origin = event.origin
        room = self._rooms.place(origin.participant, event.placement)
        request = RoomRequest(
            origin=origin,
            run_id=event.run_id,
            epoch=event.epoch,
            what=f"lease {event.name}",
            size_bytes=room.rounded(event.layout.size_bytes),
            deadline_ns=event.deadline_ns,
            grant=lambda: self._grant(event, room.device, request.size_bytes),
            refuse=lambda error: self._outbox.add(Refuse(origin=origin, error=error)),
        )
        room.request(request, wait=event.wait)

    def seal(self, event: SealLease) -> None:
        """The producer is done; whoever waited may have it now."""
        lease = self._live(event.lease_id, at_ns=event.at_ns)
        self._require_producer(lease, event.origin.participant)
        if lease.generation != event.generation:
            raise StaleLease(
                f"lease {lease.lease_id} is generation {lease.generation}, the seal names "
                f"{event.generation}: the handle is from another life of this lease"
            )
        if lease.state is LeaseState.DRAINING and lease.filling:
            self._producer_let_go(lease, at_ns=event.at_ns)
            return
        if not lease.filling:
            raise LeaseMisuse(
                f"lease {lease.lease_id} ({lease.name}) was sealed or abandoned before"
            )
        lease.move(LeaseState.SEALED, f"{lease.producer} sealed it", at_ns=event.at_ns)
        lease.filling = False
        for waiting in [w for w in self._waiting if lease.lease_id in w.lease_ids]:
            self._grant_waiting(waiting, at_ns=event.at_ns)

    def acquire(self, event: AcquireLeases) -> None:
        """Grant all, wait for the seal of all, or refuse all."""
        if not event.lease_ids or len(event.lease_ids) > FD_LIMIT:
            raise LeaseMisuse(
                f"{len(event.lease_ids)} leases were to be acquired at once; 1 to {FD_LIMIT} can be"
            )
        if len(set(event.lease_ids)) < len(event.lease_ids):
            raise LeaseMisuse(f"a lease is named twice in {list(event.lease_ids)}")
        for lease_id in event.lease_ids:
            self._check_acquirable(self._live(lease_id, at_ns=event.at_ns), event)
        waiting = _Waiting(
            origin=event.origin, lease_ids=event.lease_ids, deadline_ns=event.deadline_ns
        )
        self._waiting.append(waiting)
        self._grant_waiting(waiting, at_ns=event.at_ns)

    def release(self, participant: Participant, lease_ids: Iterable[LeaseId], at_ns: int) -> None:
        """A consumer lets go."""
        for lease_id in lease_ids:
            lease = self._live(lease_id, at_ns=at_ns)
            if participant not in lease.holders:
                raise LeaseMisuse(
                    f"{participant} releases lease {lease_id} ({lease.name}), which it does not "
                    f"hold; holders: {names(lease.mapped_by) or 'none'}"
                )
            self._drop_hold(lease, participant, "released it", at_ns=at_ns)

    def abandon(
        self, participant: Participant, lease_ids: Iterable[LeaseId], reason: str, at_ns: int
    ) -> None:
        """A producer gives leases up. Nothing for those that ended meanwhile."""
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is None:
                error = self._tombstones.error(lease_id, next_id=self._next_id, at_ns=at_ns)
                if isinstance(error, StaleLease):
                    continue
                raise error
            self._require_producer(lease, participant)
            if lease.state is LeaseState.DRAINING:
                if lease.filling:
                    self._producer_let_go(lease, at_ns=at_ns)
                continue
            lease.filling = False
            self._end(lease, f"{participant} abandoned it: {reason}", at_ns=at_ns)

    def lose(self, participant: Participant, reason: str, at_ns: int) -> None:
        """A participant died: its waits and holds end, and what it had not sealed."""
        self._waiting = [w for w in self._waiting if w.origin.participant != participant]
        for lease in list(self._leases.values()):
            if participant in lease.holders:
                self._drop_hold(lease, participant, f"died ({reason})", at_ns=at_ns)
            if lease.producer != participant or not lease.filling:
                continue
            if lease.state is LeaseState.DRAINING:
                self._producer_let_go(lease, at_ns=at_ns)
            else:
                lease.filling = False
                why = f"its producer {participant} died before sealing it ({reason})"
                self._end(lease, why, at_ns=at_ns)

    def end_epochs(self, run_id: RunId, why: Callable[[Epoch], str | None], at_ns: int) -> None:
        """End every lease of a run whose epoch is over; `why` says for which that is so."""
        for lease in list(self._leases.values()):
            if lease.run_id != run_id or lease.state is LeaseState.DRAINING:
                continue
            reason = why(lease.epoch)
            if reason is not None:
                self._end(lease, reason, at_ns=at_ns)

    def memory_failed(self, generation: Generation, reason: str, at_ns: int) -> None:
        """The memory of a lease just granted does not exist; its producer was told."""
        for lease in list(self._leases.values()):
            if lease.generation == generation:
                lease.filling = False
                lease.ended = f"the system gave no memory: {reason}"
                self._free(lease, at_ns=at_ns, exists=False)

    def cancel(self, origin: Origin) -> bool:
        """Take back a waiting acquire. Returns whether there was one."""
        before = len(self._waiting)
        self._waiting = [w for w in self._waiting if w.origin != origin]
        return len(self._waiting) < before

    def expire(self, now_ns: int) -> None:
        """Refuse the acquires whose deadline has passed."""
        for waiting in [w for w in self._waiting if w.deadline_ns <= now_ns]:
            unsealed = [
                f"lease {lease.lease_id} ({lease.name}) of {lease.producer}"
                for lease in map(self._leases.__getitem__, waiting.lease_ids)
                if lease.state is LeaseState.ALLOCATED
            ]
            text = f"not sealed within the deadline: {'; '.join(unsealed)}"
            self._refuse(waiting, BrokerTimeout(text))

    def validate(self) -> None:
        """Check the invariants; for tests."""
        for lease in self._leases.values():
            assert lease.state is not LeaseState.FREED
            assert lease.lease_id not in self._tombstones
            assert lease.holders <= lease.acquired <= set(lease.consumers)
            assert not (lease.state is LeaseState.ALLOCATED and lease.acquired)
            assert lease.state is not LeaseState.ALLOCATED or lease.filling
            assert lease.state is not LeaseState.SEALED or (not lease.filling and lease.waiting_for)
            assert lease.state is not LeaseState.DRAINING or lease.mapped_by
            assert bool(lease.ended) == (lease.state is LeaseState.DRAINING)
        for waiting in self._waiting:
            leases = [self._leases[lease_id] for lease_id in waiting.lease_ids]
            assert any(lease.state is LeaseState.ALLOCATED for lease in leases)
            for lease in leases:
                assert lease.state is not LeaseState.DRAINING
                assert waiting.origin.participant not in lease.acquired

    def _grant(self, event: AllocateLease, device: str, size_bytes: int) -> None:
        lease = Lease(
            lease_id=self._next_id,
            generation=self._outbox.next_generation(),
            run_id=event.run_id,
            epoch=event.epoch,
            group=event.group,
            name=event.name,
            specs=event.layout.specs,
            device=device,
            size_bytes=size_bytes,
            producer=event.origin.participant,
            consumers=event.consumers,
            residency=event.residency,
            next_use=event.next_use,
        )
        self._next_id = LeaseId(self._next_id + 1)
        lease.tell(event.at_ns, f"allocated by {lease.producer} for {names(lease.consumers)}")
        self._leases[lease.lease_id] = lease
        self._outbox.add(
            CreateMemory(
                generation=lease.generation,
                device=device,
                size_bytes=size_bytes,
                name=lease.name,
                zeroed=False,
            )
        )
        self._outbox.add(
            ReplyAllocated(
                origin=event.origin, lease_id=lease.lease_id, handle=lease.handle(writable=True)
            )
        )

    def _grant_waiting(self, waiting: _Waiting, *, at_ns: int) -> None:
        leases = [self._leases[lease_id] for lease_id in waiting.lease_ids]
        if any(lease.state is not LeaseState.SEALED for lease in leases):
            return
        self._waiting.remove(waiting)
        participant = waiting.origin.participant
        for lease in leases:
            lease.acquired.add(participant)
            lease.holders.add(participant)
            lease.tell(at_ns, f"{participant} acquired it")
        handles = tuple(lease.handle(writable=False) for lease in leases)
        self._outbox.add(ReplyAcquired(origin=waiting.origin, handles=handles))

    def _check_acquirable(self, lease: Lease, event: AcquireLeases) -> None:
        participant = event.origin.participant
        if lease.epoch != event.epoch:
            raise StaleLease(
                f"lease {lease.lease_id} ({lease.name}) belongs to epoch {lease.epoch}, and was to "
                f"be acquired under epoch {event.epoch}"
            )
        if lease.state is LeaseState.DRAINING:
            raise StaleLease(f"lease {lease.lease_id} ({lease.name}) has ended: {lease.ended}")
        if participant not in lease.consumers:
            raise NotDeclared(
                f"{participant} is not a declared consumer of lease {lease.lease_id} "
                f"({lease.name}); {lease.producer} declared {names(lease.consumers)}"
            )
        waits = any(
            w.origin.participant == participant and lease.lease_id in w.lease_ids
            for w in self._waiting
        )
        if waits or participant in lease.acquired:
            raise LeaseMisuse(
                f"{participant} acquires lease {lease.lease_id} ({lease.name}) a second time; a "
                "consumer acquires a lease once"
            )

    def _live(self, lease_id: LeaseId, *, at_ns: int) -> Lease:
        lease = self._leases.get(lease_id)
        if lease is None:
            raise self._tombstones.error(lease_id, next_id=self._next_id, at_ns=at_ns)
        return lease

    def _require_producer(self, lease: Lease, participant: Participant) -> None:
        if participant != lease.producer:
            raise NotDeclared(
                f"lease {lease.lease_id} ({lease.name}) is {lease.producer}'s, not {participant}'s"
            )

    def _drop_hold(self, lease: Lease, participant: Participant, what: str, *, at_ns: int) -> None:
        lease.holders.discard(participant)
        lease.tell(at_ns, f"{participant} {what}")
        if lease.state is LeaseState.SEALED and not lease.waiting_for:
            lease.ended = f"its last consumer {participant} {what}"
            self._free(lease, at_ns=at_ns)
        elif lease.state is LeaseState.DRAINING and not lease.mapped_by:
            self._free(lease, at_ns=at_ns)

    def _producer_let_go(self, lease: Lease, *, at_ns: int) -> None:
        lease.filling = False
        lease.tell(at_ns, f"{lease.producer} let go")
        if not lease.mapped_by:
            self._free(lease, at_ns=at_ns)

    def _end(self, lease: Lease, reason: str, *, at_ns: int) -> None:
        """End a lease before its last release; its bytes go when nobody has it mapped."""
        lease.ended = reason
        for waiting in [w for w in self._waiting if lease.lease_id in w.lease_ids]:
            text = f"lease {lease.lease_id} ({lease.name} of epoch {lease.epoch}) ended: {reason}"
            self._refuse(waiting, StaleLease(text, lease_id=lease.lease_id))
        if lease.mapped_by:
            lease.move(LeaseState.DRAINING, reason, at_ns=at_ns)
        else:
            self._free(lease, at_ns=at_ns)

    def _free(self, lease: Lease, *, at_ns: int, exists: bool = True) -> None:
        lease.move(LeaseState.FREED, lease.ended, at_ns=at_ns)
        del self._leases[lease.lease_id]
        self._tombstones.add(lease, at_ns=at_ns)
        self._rooms.of(lease.device).give_back(lease.size_bytes, run_scoped=False)
        if exists:
            self._outbox.add(FreeMemory(generation=lease.generation))

    def _refuse(self, waiting: _Waiting, error: RollplexError) -> None:
        self._waiting.remove(waiting)
        self._outbox.add(Refuse(origin=waiting.origin, error=error))
