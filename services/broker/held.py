"""Memory that processes hold themselves, beside the broker's: their allocators and CUDA contexts.

It is reported after the fact, so it is never refused; what is handed out has to leave room for it.
Invariant, after every event: while nothing but held memory keeps a request from being granted, the
node is told that memory is wanted, every `AGAIN_NS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.tensors.spec import Held
from services.broker.instructions import AnnounceMemoryWanted
from services.broker.ledger import HELD, LedgerRow
from services.broker.spilling import AGAIN_NS

if TYPE_CHECKING:
    from common.ids import Participant
    from services.broker.outbox import Outbox
    from services.broker.rooms import Rooms


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holding:
    participant: Participant
    device: str
    name: Held


_UNTIL = {
    Held.ALLOCATOR: "{} returns it to the device",
    Held.CONTEXT: "{} ends",
}


class HeldMemory:
    """What is held now, by participant, device and name. Only this class changes it."""

    def __init__(self, rooms: Rooms, outbox: Outbox) -> None:
        self._rooms = rooms
        self._outbox = outbox
        self._sizes: dict[_Holding, int] = {}
        self._again_ns: dict[str, int] = {}

    def put(self, participant: Participant, name: Held, size_bytes: int) -> None:
        """Set what a participant holds of its device; 0: nothing.

        Nothing either for a GPU that this broker has no memory of.
        """
        device = self._rooms.home(participant)
        if self._rooms.knows(device):
            holding = _Holding(participant=participant, device=device, name=name)
            self._set(holding, size_bytes)

    def put_contexts(self, participant: Participant) -> None:
        """Count the broker's own contexts, one on each GPU."""
        for device, size_bytes in self._rooms.context_bytes.items():
            holding = _Holding(participant=participant, device=device, name=Held.CONTEXT)
            self._set(holding, size_bytes)

    def drop(self, participant: Participant) -> None:
        """Remove what was reported by a participant that died."""
        for holding in [each for each in self._sizes if each.participant == participant]:
            self._set(holding, 0)

    def settle(self, now_ns: int) -> None:
        """Call for memory where requests wait for nothing else."""
        for room in self._rooms:
            wanted_bytes = room.kept_back_bytes
            if wanted_bytes and now_ns >= self._again_ns.get(room.device, 0):
                self._again_ns[room.device] = now_ns + AGAIN_NS
                self._outbox.add(AnnounceMemoryWanted(device=room.device, size_bytes=wanted_bytes))

    def deadlines(self) -> list[int]:
        """When memory has to be called for again."""
        return [self._again_ns[room.device] for room in self._rooms if room.kept_back_bytes]

    def rows(self) -> list[LedgerRow]:
        """One row a participant, device and name."""
        return [
            LedgerRow(
                name=holding.name,
                run_id=None,
                lease_id=None,
                epoch=None,
                group=None,
                device=holding.device,
                size_bytes=size_bytes,
                producer=holding.participant,
                waiting_for=(),
                holders=(holding.participant,),
                state=HELD,
                residency="own",
                until=_UNTIL[holding.name].format(holding.participant),
                generation=None,
            )
            for holding, size_bytes in self._sizes.items()
        ]

    def _set(self, holding: _Holding, size_bytes: int) -> None:
        before_bytes = self._sizes.pop(holding, 0)
        if size_bytes:
            self._sizes[holding] = size_bytes
        self._rooms.of(holding.device).hold(size_bytes - before_bytes)
