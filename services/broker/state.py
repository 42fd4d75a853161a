"""The broker's state machine: events in, instructions out, no input or output of its own.

It owns nothing but numbers and names; memory, sockets and clocks are the executor's. The parts:
`runs` (epoch fences), `rooms` (bytes by device), `leases` (step-scoped), `storage` (run-scoped),
`reservations`, `held` (processes' own memory). After every event: what waits cannot be granted,
what can be spilled or restored is under way, and the rows of the ledger add up to the bytes in use
and held.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatchmethod
from typing import TYPE_CHECKING

from common.actor.machine import InvalidTransition
from common.errors import RollplexError
from common.ids import Participant, Service
from common.tensors.errors import (
    BrokerTimeout,
    RequestCancelled,
    StaleLease,
    UnknownRun,
)
from common.tensors.spec import Placement
from services.broker import events
from services.broker.held import HeldMemory
from services.broker.instructions import (
    AnnounceDied,
    AnnounceJoined,
    AnnounceStepAborted,
    AnnounceStepBegan,
    Instruction,
    Refuse,
    ReplyRoom,
)
from services.broker.leases import LeaseBook
from services.broker.ledger import LedgerView
from services.broker.outbox import Outbox
from services.broker.reservations import Reservations
from services.broker.rooms import ArenaSize, Rooms
from services.broker.runs import Fence, Runs
from services.broker.storage import StorageBook

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.ids import Epoch, LeaseId, RunId
    from services.broker.events import Origin, SessionId
    from services.broker.lifecycle import LeaseState
    from services.broker.room import Room, RoomRequest


_BROKER = Participant(service=Service.BROKER)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    participant: Participant
    pid: int
    incarnation: str


class BrokerState:
    """See the module's text.

    Args:
        arenas: what may be handed out and reserved of each, the host's first.
        copies_bytes: of the host's memory, for contents that are spilled; 0: nothing is.
        first_generation: greater than every generation of an earlier broker on this node.
    """

    def __init__(
        self, arenas: Sequence[ArenaSize], *, copies_bytes: int = 0, first_generation: int = 1
    ) -> None:
        self._outbox = Outbox(first_generation=first_generation)
        self._runs = Runs()
        self._rooms = Rooms(arenas, copies_bytes=copies_bytes, table=lambda: self.ledger().table())
        self._leases = LeaseBook(runs=self._runs, rooms=self._rooms, outbox=self._outbox)
        self._storages = StorageBook(runs=self._runs, rooms=self._rooms, outbox=self._outbox)
        self._reservations = Reservations(self._rooms, self._outbox)
        self._held = HeldMemory(self._rooms, self._outbox)
        self._held.put_contexts(_BROKER)
        self._sessions: dict[SessionId, _Session] = {}

    def handle(self, event: events.BrokerEvent) -> list[Instruction]:
        """Apply one event.

        Returns: what to do about it, in order. A participant's bad request is a `Refuse` there.

        Raises:
            RollplexError: a bad order of the controller; nothing was changed.
            InvalidTransition: a broken invariant.
        """
        if isinstance(event, events.Request):
            try:
                self._apply(event)
            except InvalidTransition:
                raise
            except RollplexError as error:
                self._outbox.add(Refuse(origin=event.origin, error=error))
        else:
            self._apply(event)
        self._rooms.pump()
        self._expire(event.at_ns)
        self._storages.settle(event.at_ns)
        self._held.settle(event.at_ns)
        return self._outbox.take()

    def next_deadline_ns(self) -> int | None:
        """When a DeadlinePassed is due; None: there is nothing to look at."""
        deadlines = [
            *self._leases.deadlines(),
            *self._storages.deadlines(),
            *self._storages.openings.deadlines(),
            *self._held.deadlines(),
            *(request.deadline_ns for request in self._rooms.waiting),
        ]
        return min(deadlines, default=None)

    def ledger(self, run_id: RunId | None = None) -> LedgerView:
        """The ledger, of one run or of everything. The totals are always the node's."""
        rows = [
            *self._leases.rows(),
            *self._storages.rows(),
            *self._reservations.rows(),
            *self._held.rows(),
        ]
        return LedgerView(
            arenas=self._rooms.totals(),
            rows=tuple(row for row in rows if run_id in (None, row.run_id)),
        )

    @property
    def default_device(self) -> str:
        """Where `device` placement lies for participants that name no GPU."""
        return self._rooms.default_device

    def home(self, participant: Participant) -> str:
        """Where a participant's `device` placement lies."""
        return self._rooms.home(participant)

    def capacity_bytes(self, device: str) -> int:
        """Budget of a device; 0: there is no memory of it."""
        return self._rooms.of(device).capacity_bytes if self._rooms.knows(device) else 0

    @property
    def copies_bytes(self) -> int:
        """Budget for spilled contents."""
        return self._rooms.copies.capacity_bytes

    @property
    def participants(self) -> int:
        """How many participants are connected."""
        return len(self._sessions)

    def open_runs(self) -> list[Fence]:
        """The open runs with their epochs."""
        return self._runs.open

    def fence(self, run_id: RunId) -> Fence:
        """An open run's epoch. Raises UnknownRun."""
        return self._runs.fence(run_id)

    def is_over(self, run_id: RunId, epoch: Epoch) -> bool:
        """Whether an epoch has ended without an update, or its run is not open."""
        try:
            return self._runs.why_ended(run_id, epoch) is not None
        except UnknownRun:
            return True

    def lease_states(self) -> dict[LeaseId, LeaseState]:
        """The states of the live leases."""
        return self._leases.states()

    def validate(self) -> None:
        """Check every invariant; for tests."""
        self._leases.validate()
        self._storages.validate()
        for room in self._rooms:
            self._validate_room(room)
        participants = [session.participant for session in self._sessions.values()]
        assert len(participants) == len(set(participants))

    def _validate_room(self, room: Room) -> None:
        rows = [row for row in self.ledger().rows if row.device == room.device]
        assert room.held_bytes == sum(row.size_bytes for row in rows if row.held)
        rows = [row for row in rows if not row.held]
        assert room.used_bytes == sum(row.size_bytes for row in rows)
        assert 0 <= room.used_bytes <= room.capacity_bytes
        assert room.used_bytes <= room.peak_bytes
        run_scoped = sum(row.size_bytes for row in rows if row.lease_id is None)
        assert run_scoped == room.run_scoped_bytes
        assert 0 <= room.spillable_bytes <= run_scoped
        behind: set[Participant] = set()
        for request in room.waiting:
            assert not room.fits(request.size_bytes) or request.origin.participant in behind
            behind.add(request.origin.participant)

    @singledispatchmethod
    def _apply(self, event: events.BrokerEvent) -> None:
        raise NotImplementedError(f"no rule for {type(event).__name__}")

    @_apply.register
    def _(self, event: events.ParticipantConnected) -> None:
        self._sessions[event.session] = _Session(
            participant=event.participant, pid=event.pid, incarnation=event.incarnation
        )
        self._rooms.join(event.participant, event.device)
        self._outbox.add(
            AnnounceJoined(
                participant=event.participant, pid=event.pid, incarnation=event.incarnation
            )
        )

    @_apply.register
    def _(self, event: events.ParticipantLost) -> None:
        session = self._sessions.pop(event.session)
        participant = session.participant
        self._storages.openings.lose(participant)
        for request in self._rooms.remove_of(participant):
            self._storages.openings.creation_dropped(request)
        self._leases.lose(participant, event.reason, event.at_ns)
        self._storages.lose(participant, event.reason)
        self._reservations.drop(participant=participant)
        self._held.drop(participant)
        self._outbox.add(
            AnnounceDied(
                participant=participant,
                pid=session.pid,
                incarnation=session.incarnation,
                reason=event.reason,
            )
        )

    @_apply.register
    def _(self, event: events.RunOpened) -> None:
        if self._runs.open_run(event.run_id, event.epoch):
            self._end_epochs(event.run_id, event.at_ns)

    @_apply.register
    def _(self, event: events.StepRequested) -> None:
        if self._runs.begin(event.plan):
            self._end_epochs(event.plan.run_id, event.at_ns)
            room = {
                device: max(
                    0,
                    most_bytes
                    - self._storages.away_bytes(device)
                    - self._reservations.away_bytes(device),
                )
                for device, most_bytes in self._rooms.lease_bytes().items()
            }
            self._outbox.add(AnnounceStepBegan(plan=event.plan, lease_room_bytes=room))

    @_apply.register
    def _(self, event: events.AbortRequested) -> None:
        if self._runs.abort(event.run_id, event.epoch, event.reason):
            self._end_epochs(event.run_id, event.at_ns)
            self._outbox.add(
                AnnounceStepAborted(
                    run_id=event.run_id,
                    step=self._runs.fence(event.run_id).step,
                    epoch=event.epoch,
                    reason=event.reason,
                )
            )

    @_apply.register
    def _(self, event: events.RunClosed) -> None:
        run_id = event.run_id
        if not self._runs.close(run_id):
            return
        self._storages.openings.close_run(run_id)
        self._refuse_room(run_id, lambda _: f"run {run_id} was closed")
        self._leases.end_epochs(run_id, lambda _: f"run {run_id} was closed", event.at_ns)
        self._storages.close_run(run_id)
        self._reservations.drop(run_id=run_id)

    @_apply.register
    def _(self, event: events.DeadlinePassed) -> None:
        """Every event looks at the deadlines afterwards; this one does nothing else."""

    @_apply.register
    def _(self, event: events.MemoryFailed) -> None:
        self._leases.memory_failed(event.generation, event.reason, event.at_ns)
        self._storages.memory_failed(event.generation)

    @_apply.register
    def _(self, event: events.MoveEnded) -> None:
        self._storages.move_ended(event)

    @_apply.register
    def _(self, event: events.ParkStorage) -> None:
        self._storages.park(event)

    @_apply.register
    def _(self, event: events.PrefetchStorage) -> None:
        self._storages.prefetch(event)

    @_apply.register
    def _(self, event: events.AllocateLease) -> None:
        self._leases.allocate(event)

    @_apply.register
    def _(self, event: events.SealLease) -> None:
        self._leases.seal(event)

    @_apply.register
    def _(self, event: events.AcquireLeases) -> None:
        self._leases.acquire(event)

    @_apply.register
    def _(self, event: events.ReleaseLeases) -> None:
        self._leases.release(event.origin.participant, event.lease_ids, event.at_ns)

    @_apply.register
    def _(self, event: events.AbandonLeases) -> None:
        participant = event.origin.participant
        self._leases.abandon(participant, event.lease_ids, event.reason, event.at_ns)

    @_apply.register
    def _(self, event: events.OpenStorage) -> None:
        self._storages.open(event)

    @_apply.register
    def _(self, event: events.HoldStorage) -> None:
        self._storages.hold(event)

    @_apply.register
    def _(self, event: events.ReleaseHold) -> None:
        self._storages.release(event)

    @_apply.register
    def _(self, event: events.PublishHold) -> None:
        self._storages.publish(event)

    @_apply.register
    def _(self, event: events.ReserveMemory) -> None:
        if event.origin.request or self._runs.knows(event.run_id):
            self._runs.require_known(event.run_id)
            self._reservations.put(event)

    @_apply.register
    def _(self, event: events.ReportHeld) -> None:
        participant = event.origin.participant
        self._held.put(participant, event.name, event.size_bytes)
        if event.origin.request:
            room = self._rooms.place(participant, Placement.DEVICE)
            left_bytes = room.left_bytes - self._storages.awaited_bytes(room.device)
            self._outbox.add(ReplyRoom(origin=event.origin, free_bytes=max(0, left_bytes)))

    @_apply.register
    def _(self, event: events.CancelRequest) -> None:
        origin = events.Origin(
            session=event.origin.session,
            request=event.cancelled,
            participant=event.origin.participant,
        )
        if self._withdraw(origin):
            error = RequestCancelled("the caller took the request back")
            self._outbox.add(Refuse(origin=origin, error=error))

    def _withdraw(self, origin: Origin) -> bool:
        for request in self._rooms.remove_origin(origin):
            self._storages.openings.creation_dropped(request)
            return True
        return (
            self._leases.cancel(origin)
            or self._storages.openings.cancel(origin)
            or self._storages.cancel(origin)
        )

    def _end_epochs(self, run_id: RunId, at_ns: int) -> None:
        """Free and refuse everything of the run's epochs that are over."""

        def why(epoch: Epoch) -> str | None:
            return self._runs.why_ended(run_id, epoch)

        self._refuse_room(run_id, lambda epoch: why(epoch) if epoch is not None else None)
        self._leases.end_epochs(run_id, why, at_ns)
        self._storages.end_epochs(run_id)

    def _refuse_room(self, run_id: RunId, why: Callable[[Epoch | None], str | None]) -> None:
        for request in self._rooms.remove_stale(run_id, lambda epoch: why(epoch) is not None):
            text = f"{request.what} was waiting for room: {why(request.epoch)}"
            self._outbox.add(Refuse(origin=request.origin, error=StaleLease(text)))
            self._storages.openings.creation_dropped(request)

    def _expire(self, now_ns: int) -> None:
        for request in self._rooms.expire(now_ns):
            self._outbox.add(Refuse(origin=request.origin, error=self._no_room_in_time(request)))
            self._storages.openings.creation_dropped(request)
            self._rooms.pump()
        self._leases.expire(now_ns)
        self._storages.openings.expire(now_ns)
        self._storages.expire(now_ns)

    def _no_room_in_time(self, request: RoomRequest) -> BrokerTimeout:
        return BrokerTimeout(
            f"{request.what} of {request.origin.participant} wants {request.size_bytes} bytes and "
            f"got no room in time\n{self.ledger().table()}"
        )
