"""Reservations: memory of participants' own allocators, counted in the same ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.tensors.errors import RequestCancelled
from services.broker.instructions import Refuse, ReplyDone
from services.broker.ledger import LedgerRow
from services.broker.room import RoomRequest

if TYPE_CHECKING:
    from common.ids import Participant, RunId
    from services.broker.events import ReserveMemory
    from services.broker.outbox import Outbox
    from services.broker.rooms import Rooms


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reservation:
    participant: Participant
    run_id: RunId
    device: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    taken_bytes: int = 0
    away_bytes: int = 0
    """That will be taken in each step, beside those."""


class Reservations:
    """What is reserved now, by participant, run, device and name. Only this class changes it."""

    def __init__(self, rooms: Rooms, outbox: Outbox) -> None:
        self._rooms = rooms
        self._outbox = outbox
        self._sizes: dict[_Reservation, _Size] = {}
        self._requests: dict[_Reservation, RoomRequest] = {}
        """Newest one of each that waits, or has waited, for room."""

    def put(self, event: ReserveMemory) -> None:
        """Set a reservation; 0 removes it. A larger one may wait for room until its deadline.

        It takes the place of one that waits.

        Raises: ArenaFull and then changes nothing.
        """
        participant = event.origin.participant
        room = self._rooms.place(participant, event.placement)
        key = _Reservation(
            participant=participant, run_id=event.run_id, device=room.device, name=event.name
        )
        replaced = self._requests.pop(key, None)
        if replaced is not None and replaced in room.waiting:
            room.waiting.remove(replaced)
            replaced.refuse(RequestCancelled(f"{replaced.what} was asked for anew"))
        before = self._sizes.get(key, _Size()).taken_bytes
        more_bytes = event.size_bytes - before
        what = f"reservation {event.name} of {participant}, now of {before} bytes,"
        if more_bytes <= 0:
            room.give_back(-more_bytes, run_scoped=True)
            self._grow(key, event, more_bytes)
        elif event.deadline_ns is None:
            room.take_now(what, more_bytes)
            self._grow(key, event, more_bytes)
        else:
            self._requests[key] = request = RoomRequest(
                origin=event.origin,
                run_id=event.run_id,
                epoch=None,
                what=what,
                size_bytes=more_bytes,
                deadline_ns=event.deadline_ns,
                grant=lambda: self._grow(key, event, more_bytes),
                refuse=lambda error: self._outbox.add(Refuse(origin=event.origin, error=error)),
            )
            room.request(request, wait=True)

    def _grow(self, key: _Reservation, event: ReserveMemory, more_bytes: int) -> None:
        """The room is taken, or given back."""
        taken_bytes = self._sizes.get(key, _Size()).taken_bytes + more_bytes
        if taken_bytes or event.away_bytes:
            self._sizes[key] = _Size(taken_bytes=taken_bytes, away_bytes=event.away_bytes)
        else:
            self._sizes.pop(key, None)
        if event.origin.request:
            self._outbox.add(ReplyDone(origin=event.origin))

    def away_bytes(self, device: str) -> int:
        """Of a device, what is not taken now and will be in each step."""
        return sum(size.away_bytes for key, size in self._sizes.items() if key.device == device)

    def drop(self, *, participant: Participant | None = None, run_id: RunId | None = None) -> None:
        """Remove those of a participant that died, or of a run that was closed."""
        for key in list(self._sizes):
            if participant in (None, key.participant) and run_id in (None, key.run_id):
                self._requests.pop(key, None)
                taken_bytes = self._sizes.pop(key).taken_bytes
                self._rooms.of(key.device).give_back(taken_bytes, run_scoped=True)

    def rows(self) -> list[LedgerRow]:
        """One row a reservation."""
        return [
            LedgerRow(
                name=key.name,
                run_id=key.run_id,
                lease_id=None,
                epoch=None,
                group=None,
                device=key.device,
                size_bytes=size.taken_bytes,
                producer=key.participant,
                waiting_for=(),
                holders=(key.participant,),
                state="reserved",
                residency="phase",
                until=f"{key.participant} gives it back",
                generation=None,
            )
            for key, size in self._sizes.items()
            if size.taken_bytes
        ]
