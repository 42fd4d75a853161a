"""When the contents of spillable storages leave their device, and when they come back.

Invariants, after every event:
- Only a RESIDENT storage is held, or mapped by anybody.
- Whatever can be spilled is being spilled, and whatever is wanted and has room is coming back.
- Each participant that was given the storage and lives has it mapped or parked, never both.
- A copy that is whole stays whole until somebody is let in to write: what was only read leaves its
  device again without being copied.

A storage that is wanted while its budget, or the device itself, has no room waits, for as long as
somebody wants it; the node is told every now and then that memory is wanted. One that is only
expected gives way to whatever waits for room of its device: leases, storages to be made, and
spilled storages that somebody waits to hold or to open. Its own hold may come after theirs: parts
of a whole are held in order, and any of them may be the first to be back. If it has come back
already, it leaves again, until a hold or another word brings it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.tensors.errors import StorageMisuse
from services.broker.events import MemoryRestored, MemorySpilled
from services.broker.instructions import (
    AnnounceMemoryWanted,
    AnnounceMoved,
    RestoreMemory,
    SpillMemory,
)
from services.broker.residence import Residence

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from common.ids import Participant
    from services.broker.events import MoveEnded
    from services.broker.holds import Storage
    from services.broker.openings import StorageKey
    from services.broker.outbox import Outbox
    from services.broker.rooms import Rooms

AGAIN_NS = 500_000_000
"""Between two attempts of a restore that finds no memory on its device."""


class Spilling:
    """See the module's text.

    Args:
        storages: all live ones.
        opening: whether somebody waits to open one.
    """

    def __init__(
        self,
        *,
        rooms: Rooms,
        outbox: Outbox,
        storages: Mapping[StorageKey, Storage],
        opening: Callable[[StorageKey], bool],
    ) -> None:
        self._rooms = rooms
        self._outbox = outbox
        self._storages = storages
        self._opening = opening

        self._called_ns: dict[str, int] = {}
        """By device, when the node was last told that memory of it is wanted."""
        self._bare_until_ns: dict[str, int] = {}
        """By device that had no memory for a restore, until when nothing that is only expected is
        tried."""

    def deadlines(self) -> list[int]:
        """When storages that wait for memory have to be looked at again."""
        return [s.again_ns for s in self._storages.values() if self._waits(s)]

    def made(self, storage: Storage) -> None:
        """It is there, its room taken; if it may be spilled, room for its copy is promised."""
        if storage.spillable:
            self._rooms.promised_bytes += storage.size_bytes
        self._is_on_device(storage)

    def park(self, storage: Storage, participant: Participant) -> None:
        """A participant has unmapped it. Nothing for one that holds it: a hold has crossed this."""
        if not storage.spillable:
            raise StorageMisuse(
                f"{participant} parks {storage.name}, which is {storage.spec.residency} on "
                f"{storage.device} and cannot be spilled"
            )
        if all(hold.participant != participant for hold in storage.holds.values()):
            storage.lose(participant)
            storage.parked.add(participant)
            storage.uncopyable = False

    def prefetch(self, storage: Storage, participant: Participant) -> None:
        """A participant will hold it. Nothing for one that has not parked it."""
        if participant in storage.parked:
            storage.expected.add(participant)

    def ended(self, event: MoveEnded) -> Storage | None:
        """A move has ended. Returns its storage; None: the run was closed meanwhile."""
        found = (s for s in self._storages.values() if s.generation == event.generation)
        storage = next(found, None)
        if storage is None:
            return None
        match storage.cell.state, event:
            case Residence.SPILLING, MemorySpilled(seconds=seconds):
                self._give_back_device(storage)
                storage.copied = True
                storage.cell.move(Residence.SPILLED, "copied")
                self._try_again(storage.device)
                self._tell(storage, seconds, restored=False)
            case Residence.RESTORING, MemoryRestored(seconds=seconds):
                storage.life += 1
                storage.cell.move(Residence.RESIDENT, "copied back")
                self._tell(storage, seconds, restored=True)
            case Residence.SPILLING, _:
                storage.has_copy = storage.copied = False
                self._rooms.copies.give_back(storage.size_bytes, run_scoped=True)
                storage.uncopyable = True
                storage.cell.move(Residence.RESIDENT, "no memory for the copy")
            case _:
                self._give_back_device(storage)
                storage.cell.move(Residence.SPILLED, "no memory on the device")
                storage.starved = True
                self._bare_until_ns[storage.device] = event.at_ns + AGAIN_NS
                self._call_for_memory(storage, event.at_ns)
        return storage

    def settle(self, now_ns: int) -> None:
        """Begin the moves that can be made, those that somebody waits for first."""
        for storage in self._storages.values():
            if self._awaited(storage):
                self._restore(storage, now_ns)
        for storage in self._storages.values():
            if self._can_spill(storage):
                self._spill(storage)
            elif self._waits(storage) and not self._awaited(storage):
                self._restore(storage, now_ns)

    def free(self, storage: Storage) -> None:
        """Its room goes, on the device and in the host's memory."""
        if storage.on_device:
            self._give_back_device(storage)
        if storage.has_copy:
            self._rooms.copies.give_back(storage.size_bytes, run_scoped=True)
        if storage.spillable:
            self._rooms.promised_bytes -= storage.size_bytes

    def validate(self) -> None:
        """Check the invariants; for tests."""
        promised = [s.size_bytes for s in self._storages.values() if s.spillable]
        assert sum(promised) == self._rooms.promised_bytes <= self._rooms.copies.capacity_bytes
        for storage in self._storages.values():
            assert storage.resident or not (storage.holds or storage.mapped)
            assert storage.resident or (storage.has_copy and storage.spillable)
            assert storage.has_copy or not storage.copied
            assert storage.copied or storage.cell.state is not Residence.SPILLED
            assert not storage.mapped & storage.parked
            assert storage.expected <= storage.parked
            assert {hold.participant for hold in storage.holds.values()} <= storage.mapped
            assert not self._can_spill(storage)
            if self._waits(storage):
                assert storage.starved or not self._fits(storage)

    def awaited_bytes(self, device: str) -> int:
        """Of a device, what comes back as soon as there is room: somebody cannot go on before."""
        mine = (s for s in self._storages.values() if s.device == device)
        return sum(storage.size_bytes for storage in mine if self._awaited(storage))

    def _wanted(self, storage: Storage) -> bool:
        """Of those who only expect it nobody is kept from work that they may wait for."""
        if self._demanded(storage):
            return True
        return bool(storage.expected) and not self._is_short(storage.device)

    def _demanded(self, storage: Storage) -> bool:
        """Whether somebody waits to hold or to open it, and would be let in if it were there."""
        return any(
            storage.judge_resident(wanted).grant for wanted in storage.waiting
        ) or self._opening((storage.run_id, storage.name))

    def _awaited(self, storage: Storage) -> bool:
        return storage.cell.state is Residence.SPILLED and self._demanded(storage)

    def _is_short(self, device: str) -> bool:
        """Whether somebody waits for room of a device."""
        awaited = (s for s in self._storages.values() if s.device == device and self._awaited(s))
        return bool(self._rooms.of(device).waiting) or any(awaited)

    def _waits(self, storage: Storage) -> bool:
        return storage.cell.state is Residence.SPILLED and self._wanted(storage)

    def _can_spill(self, storage: Storage) -> bool:
        movable = storage.spillable and storage.resident and not storage.uncopyable
        idle = not (storage.mapped or storage.holds)
        return movable and idle and not self._wanted(storage)

    def _spill(self, storage: Storage) -> None:
        if not storage.has_copy:
            self._rooms.copies.take_now(f"copy of {storage.name}", storage.size_bytes)
            storage.has_copy = True
        storage.expected.clear()
        storage.cell.move(Residence.SPILLING, "nobody has it mapped")
        self._outbox.add(SpillMemory(generation=storage.generation, copied=storage.copied))

    def _try_again(self, device: str) -> None:
        """Memory of a device was given back: what found none need not wait any longer."""
        self._bare_until_ns.pop(device, None)
        for storage in self._storages.values():
            if storage.device == device and storage.starved:
                storage.again_ns = 0

    def _restore(self, storage: Storage, now_ns: int) -> None:
        bare_until_ns = self._bare_until_ns.get(storage.device, 0)
        if now_ns < bare_until_ns and not self._demanded(storage):
            storage.starved, storage.again_ns = True, bare_until_ns
            return
        due = now_ns >= storage.again_ns
        if self._fits(storage) and (due or not storage.starved):
            self._rooms.of(storage.device).take_now(storage.name, storage.size_bytes)
            self._is_on_device(storage)
            storage.starved = False
            storage.cell.move(Residence.RESTORING, "wanted")
            self._outbox.add(RestoreMemory(generation=storage.generation))
        elif due:
            self._call_for_memory(storage, now_ns)

    def _tell(self, storage: Storage, seconds: float, *, restored: bool) -> None:
        self._outbox.add(
            AnnounceMoved(
                run_id=storage.run_id,
                storage=storage.name,
                device=storage.device,
                restored=restored,
                size_bytes=storage.size_bytes,
                seconds=seconds,
            )
        )

    def _fits(self, storage: Storage) -> bool:
        return self._rooms.of(storage.device).fits(storage.size_bytes)

    def _call_for_memory(self, storage: Storage, now_ns: int) -> None:
        storage.again_ns = now_ns + AGAIN_NS
        if now_ns >= self._called_ns.get(storage.device, now_ns - AGAIN_NS) + AGAIN_NS:
            self._called_ns[storage.device] = now_ns
            wanted = AnnounceMemoryWanted(device=storage.device, size_bytes=storage.size_bytes)
            self._outbox.add(wanted)

    def _is_on_device(self, storage: Storage) -> None:
        if storage.spillable:
            self._rooms.of(storage.device).spillable_bytes += storage.size_bytes

    def _give_back_device(self, storage: Storage) -> None:
        room = self._rooms.of(storage.device)
        room.give_back(storage.size_bytes, run_scoped=True)
        if storage.spillable:
            room.spillable_bytes -= storage.size_bytes
