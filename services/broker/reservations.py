"""Reservations: memory of participants' own allocators, counted in the same ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.broker.ledger import LedgerRow

if TYPE_CHECKING:
    from common.ids import Participant, RunId
    from common.tensors.spec import Placement
    from services.broker.rooms import Rooms


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reservation:
    participant: Participant
    run_id: RunId
    device: str
    name: str


class Reservations:
    """What is reserved now, by participant, run, device and name. Only this class changes it."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._sizes: dict[_Reservation, int] = {}

    def put(
        self,
        participant: Participant,
        run_id: RunId,
        name: str,
        size_bytes: int,
        placement: Placement,
    ) -> None:
        """Set a reservation; 0 removes it. Raises ArenaFull and then changes nothing."""
        room = self._rooms.place(participant, placement)
        key = _Reservation(participant=participant, run_id=run_id, device=room.device, name=name)
        before = self._sizes.get(key, 0)
        if size_bytes > before:
            what = f"reservation {name} of {participant}, now of {before} bytes,"
            room.take_now(what, size_bytes - before)
        else:
            room.give_back(before - size_bytes, run_scoped=True)
        if size_bytes:
            self._sizes[key] = size_bytes
        else:
            self._sizes.pop(key, None)

    def drop(self, *, participant: Participant | None = None, run_id: RunId | None = None) -> None:
        """Remove those of a participant that died, or of a run that was closed."""
        for key in list(self._sizes):
            if participant in (None, key.participant) and run_id in (None, key.run_id):
                self._rooms.of(key.device).give_back(self._sizes.pop(key), run_scoped=True)

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
                size_bytes=size_bytes,
                producer=key.participant,
                waiting_for=(),
                holders=(key.participant,),
                state="reserved",
                residency="phase",
                until=f"{key.participant} gives it back",
                generation=None,
            )
            for key, size_bytes in self._sizes.items()
        ]
