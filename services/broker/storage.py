"""The storages of all runs, and the holds on them: versioned contents and accumulators.

Invariants: a WRITE or EXCLUSIVE hold is alone on its storage; a hold's participant is declared for
its kind; what waits for a storage can neither be granted nor has to be refused. Where the contents
are is the business of `spilling`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from common.tensors.errors import (
    BrokerTimeout,
    NotDeclared,
    StaleLease,
    StorageMisuse,
    UnknownRun,
    UnknownStorage,
)
from common.tensors.parts import in_flight_bytes, whole_of
from common.tensors.spec import Residency, layout
from common.tensors.storage import HoldKind
from services.broker.events import HoldId, StorageId
from services.broker.holds import Hold, Storage, WaitingHold
from services.broker.instructions import (
    FreeMemory,
    Refuse,
    ReplyDone,
    ReplyHeld,
)
from services.broker.ledger import LedgerRow, names
from services.broker.openings import Openings
from services.broker.spilling import Spilling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.errors import RollplexError
    from common.ids import Participant, RunId
    from services.broker.events import (
        Generation,
        HoldStorage,
        MoveEnded,
        OpenStorage,
        Origin,
        ParkStorage,
        PrefetchStorage,
        PublishHold,
        ReleaseHold,
    )
    from services.broker.openings import StorageKey
    from services.broker.outbox import Outbox
    from services.broker.rooms import Rooms
    from services.broker.runs import Runs


class StorageBook:
    """See the module's text."""

    def __init__(self, *, runs: Runs, rooms: Rooms, outbox: Outbox) -> None:
        self._runs = runs
        self._rooms = rooms
        self._outbox = outbox
        self._storages: dict[StorageKey, Storage] = {}
        self.openings = Openings(
            rooms=rooms, outbox=outbox, find=self._storages.get, make=self._make
        )
        self._spilling = Spilling(
            rooms=rooms, outbox=outbox, storages=self._storages, opening=self.openings.wait_for
        )
        self._next_storage = StorageId(1)
        self._next_hold = HoldId(1)

    def rows(self) -> list[LedgerRow]:
        """One row a storage and place that has memory for it."""
        return [row for storage in self._storages.values() for row in storage.rows()]

    def away_bytes(self, device: str) -> int:
        """Of a device, what storages will take beyond what they take now.

        Negative where parts of a whole will leave it; of those that can be spilled, so many count
        as are there at a time.
        """
        mine = [s for s in self._storages.values() if s.device == device]
        wholes: defaultdict[tuple[RunId, str], list[int]] = defaultdict(list)
        needed_bytes = 0
        for storage in mine:
            if storage.spillable:
                wholes[storage.run_id, whole_of(storage.name)].append(storage.size_bytes)
            else:
                needed_bytes += storage.size_bytes
        needed_bytes += sum(in_flight_bytes(sizes) for sizes in wholes.values())
        return needed_bytes - sum(s.size_bytes for s in mine if s.on_device)

    def deadlines(self) -> list[int]:
        """When waiting requests have to be refused, and spilled storages looked at again."""
        waiting = [w.deadline_ns for storage in self._storages.values() for w in storage.waiting]
        return [*waiting, *self._spilling.deadlines()]

    def open(self, event: OpenStorage) -> None:
        """Attach, create, or wait for the creator."""
        self._runs.require_known(event.run_id)
        self.openings.add(event)

    def hold(self, event: HoldStorage) -> None:
        """Grant, wait or refuse."""
        storage = self._by_id(event.storage_id)
        participant = event.origin.participant
        allowed = storage.spec.writers
        if event.kind is HoldKind.READ:
            allowed = (*storage.spec.readers, *allowed)
        if participant not in allowed:
            raise NotDeclared(
                f"{participant} wants a {event.kind} hold on {storage.name}, which is declared "
                f"for {names(allowed)}"
            )
        if event.kind is HoldKind.EXCLUSIVE:
            self._runs.require_current(storage.run_id, event.epoch)
        wanted = WaitingHold(
            origin=event.origin,
            kind=event.kind,
            version=event.version,
            epoch=event.epoch,
            deadline_ns=event.deadline_ns,
        )
        storage.waiting.append(wanted)
        self._serve(storage)

    def publish(self, event: PublishHold) -> None:
        """A WRITE hold becomes the storage's version."""
        storage, hold = self._live_hold(event.hold_id, event.origin.participant)
        if hold.kind is not HoldKind.WRITE:
            raise StorageMisuse(
                f"{hold.participant} publishes {storage.name} under a {hold.kind} hold"
            )
        del storage.holds[hold.hold_id]
        storage.version = hold.version
        storage.torn = ""
        self._outbox.add(ReplyDone(origin=event.origin))
        self._serve(storage)

    def release(self, event: ReleaseHold) -> None:
        """A hold ends. Nothing for one that ended with its run."""
        if 0 < event.hold_id < self._next_hold and self._find_hold(event.hold_id) is None:
            return
        storage, hold = self._live_hold(event.hold_id, event.origin.participant)
        del storage.holds[hold.hold_id]
        if hold.kind is HoldKind.WRITE and not event.untouched:
            storage.torn = f"{hold.participant} gave up writing version {hold.version}"
        if hold.kind is HoldKind.EXCLUSIVE:
            storage.dirty_epoch = None
        self._serve(storage)

    def park(self, event: ParkStorage) -> None:
        """A participant has unmapped a storage. Nothing for one that ended with its run."""
        storage = self._known(event.storage_id, event.origin.participant)
        if storage is not None:
            self._spilling.park(storage, event.origin.participant)

    def prefetch(self, event: PrefetchStorage) -> None:
        """A participant will hold what it has parked. Nothing if that ended with its run."""
        storage = self._known(event.storage_id, event.origin.participant)
        if storage is not None:
            self._spilling.prefetch(storage, event.origin.participant)

    def move_ended(self, event: MoveEnded) -> None:
        """The contents of a storage are elsewhere, or could not be moved."""
        storage = self._spilling.ended(event)
        if storage is not None and storage.resident:
            self.openings.serve((storage.run_id, storage.name))
            self._serve(storage)

    def settle(self, now_ns: int) -> None:
        """Begin to move contents; see `spilling`."""
        self._spilling.settle(now_ns)

    def lose(self, participant: Participant, reason: str) -> None:
        """A participant died: its waits and holds end."""
        for storage in self._storages.values():
            storage.waiting = [w for w in storage.waiting if w.origin.participant != participant]
            for hold in [h for h in storage.holds.values() if h.participant == participant]:
                del storage.holds[hold.hold_id]
                if hold.kind is HoldKind.WRITE:
                    storage.torn = (
                        f"{participant} died while it wrote version {hold.version} ({reason})"
                    )
                elif hold.kind is HoldKind.EXCLUSIVE:
                    storage.dirty_epoch = hold.epoch
            storage.lose(participant)
            self._serve(storage)

    def end_epochs(self, run_id: RunId) -> None:
        """Refuse waiting EXCLUSIVE holds of epochs that are over; the granted ones stay."""
        for storage in self._of_run(run_id):
            for wanted in [w for w in storage.waiting if w.kind is HoldKind.EXCLUSIVE]:
                reason = self._runs.why_ended(run_id, wanted.epoch)
                if reason is not None:
                    self._refuse(storage, wanted, StaleLease(reason))
            self._serve(storage)

    def close_run(self, run_id: RunId) -> None:
        """Free the run's storages and refuse whoever waits for them."""
        error = UnknownRun(f"run {run_id} was closed", run_id=run_id)
        for storage in self._of_run(run_id):
            for wanted in list(storage.waiting):
                self._refuse(storage, wanted, error)
            self._free(storage)

    def memory_failed(self, generation: Generation) -> None:
        """The memory of a storage just made does not exist; its openers were told."""
        for storage in list(self._storages.values()):
            if storage.generation == generation:
                self._free(storage, exists=False)

    def cancel(self, origin: Origin) -> bool:
        """Take back a waiting hold. Returns whether there was one."""
        for storage in self._storages.values():
            for wanted in [w for w in storage.waiting if w.origin == origin]:
                storage.waiting.remove(wanted)
                self._serve(storage)
                return True
        return False

    def expire(self, now_ns: int) -> None:
        """Refuse the holds whose deadline has passed."""
        for storage in self._storages.values():
            for wanted in [w for w in storage.waiting if w.deadline_ns <= now_ns]:
                text = (
                    f"{wanted} on {storage.name} was not granted in time: the storage is "
                    f"{storage.describe()}, held by {storage.held_by()}"
                )
                if not storage.resident:
                    text += f"\n{self._rooms.table()}"
                self._refuse(storage, wanted, BrokerTimeout(text))

    def validate(self) -> None:
        """Check the invariants; for tests."""
        for key, storage in self._storages.items():
            assert key == (storage.run_id, storage.name)
            holds = list(storage.holds.values())
            assert len(holds) <= 1 or all(hold.kind is HoldKind.READ for hold in holds)
            for hold in holds:
                assert storage.may_open(hold.participant)
                assert hold.kind is HoldKind.READ or hold.participant in storage.spec.writers
                assert hold.kind is not HoldKind.READ or hold.version == storage.version
            for wanted in storage.waiting:
                verdict = storage.judge(wanted)
                assert not verdict.grant
                assert verdict.error is None
        self.openings.validate()
        self._spilling.validate()

    def _make(self, event: OpenStorage, device: str, size_bytes: int) -> Storage:
        spec = event.create
        assert spec is not None
        storage = Storage(
            storage_id=self._next_storage,
            generation=self._outbox.next_generation(),
            run_id=event.run_id,
            name=event.name,
            spec=spec,
            layout=layout(spec.tensors),
            device=device,
            size_bytes=size_bytes,
            creator=event.origin.participant,
            spillable=spec.residency is Residency.SPILLABLE
            and self._rooms.spills(device, size_bytes),
        )
        self._next_storage = StorageId(self._next_storage + 1)
        self._storages[event.run_id, event.name] = storage
        self._spilling.made(storage)
        return storage

    def _serve(self, storage: Storage) -> None:
        """Grant and refuse waiting holds, first come first served, until nothing changes."""
        for wanted in list(storage.waiting):
            verdict = storage.judge(wanted)
            if verdict.error is not None:
                self._refuse(storage, wanted, verdict.error)
            elif verdict.grant:
                storage.waiting.remove(wanted)
                self._grant(storage, wanted)

    def _grant(self, storage: Storage, wanted: WaitingHold) -> None:
        hold = Hold(
            hold_id=self._next_hold,
            participant=wanted.origin.participant,
            kind=wanted.kind,
            version=wanted.version,
            epoch=wanted.epoch,
        )
        self._next_hold = HoldId(self._next_hold + 1)
        storage.holds[hold.hold_id] = hold
        if hold.kind is not HoldKind.READ:
            storage.copied = False
        storage.give_to(hold.participant)
        dirty = wanted.kind is HoldKind.EXCLUSIVE and storage.dirty_epoch is not None
        self._outbox.add(
            ReplyHeld(
                origin=wanted.origin,
                hold_id=hold.hold_id,
                version=hold.version,
                dirty=dirty,
                handle=storage.handle(hold.participant) if storage.spillable else None,
            )
        )

    def _free(self, storage: Storage, *, exists: bool = True) -> None:
        del self._storages[storage.run_id, storage.name]
        self._spilling.free(storage)
        if exists:
            self._outbox.add(FreeMemory(generation=storage.generation))

    def _refuse(self, storage: Storage, wanted: WaitingHold, error: RollplexError) -> None:
        storage.waiting.remove(wanted)
        self._outbox.add(Refuse(origin=wanted.origin, error=error))

    def _of_run(self, run_id: RunId) -> list[Storage]:
        return [storage for storage in self._storages.values() if storage.run_id == run_id]

    def _known(self, storage_id: StorageId, participant: Participant) -> Storage | None:
        """A storage that a participant may use; None: it ended with its run."""
        live = any(storage.storage_id == storage_id for storage in self._storages.values())
        if not live and 0 < storage_id < self._next_storage:
            return None
        storage = self._by_id(storage_id)
        if not storage.may_open(participant):
            raise NotDeclared(
                f"{participant} is neither reader nor writer of storage {storage.name}"
            )
        return storage

    def _by_id(self, storage_id: StorageId) -> Storage:
        for storage in self._storages.values():
            if storage.storage_id == storage_id:
                return storage
        raise UnknownStorage(
            f"storage {storage_id} does not exist; it was never opened here or its run was closed"
        )

    def _holds(self) -> Iterator[tuple[Storage, Hold]]:
        for storage in self._storages.values():
            for hold in storage.holds.values():
                yield storage, hold

    def _find_hold(self, hold_id: HoldId) -> tuple[Storage, Hold] | None:
        return next((item for item in self._holds() if item[1].hold_id == hold_id), None)

    def _live_hold(self, hold_id: HoldId, participant: Participant) -> tuple[Storage, Hold]:
        found = self._find_hold(hold_id)
        if found is None or found[1].participant != participant:
            raise UnknownStorage(
                f"{participant} has no hold {hold_id}; it was released, or ended with its run"
            )
        return found
