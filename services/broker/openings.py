"""Participants that want a storage: the first that can create it does, the others attach.

Invariants: nobody waits for a storage that exists, unless its contents are not on its device; while
somebody who could create one waits, a creation is under way (its request waits for room).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import InvalidArgument, RollplexError
from common.ids import RunId
from common.tensors.errors import BrokerTimeout, NotDeclared, StorageMismatch, UnknownRun
from common.tensors.spec import layout
from services.broker.instructions import CreateMemory, Refuse, ReplyStorageOpened
from services.broker.ledger import names
from services.broker.room import RoomRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.ids import Participant
    from common.tensors.storage import StorageSpec
    from services.broker.events import OpenStorage, Origin
    from services.broker.holds import Storage
    from services.broker.outbox import Outbox
    from services.broker.rooms import Rooms

StorageKey = tuple[RunId, str]


class Openings:
    """See the module's text."""

    def __init__(
        self,
        *,
        rooms: Rooms,
        outbox: Outbox,
        find: Callable[[StorageKey], Storage | None],
        make: Callable[[OpenStorage, str, int], Storage],
    ) -> None:
        self._rooms = rooms
        self._outbox = outbox
        self._find = find
        self._make = make
        self._creating: dict[StorageKey, OpenStorage] = {}
        self._openers: list[OpenStorage] = []

    def deadlines(self) -> list[int]:
        """When waiting openers have to be refused."""
        return [opener.deadline_ns for opener in self._openers]

    def add(self, event: OpenStorage) -> None:
        """Attach, create, or wait for the creator."""
        if event.create is not None:
            layout(event.create.tensors)
            _require_declared(event.name, event.create, event.origin.participant)
            self._rooms.place(event.origin.participant, event.create.placement)
            if not event.create.writers:
                raise InvalidArgument(f"storage {event.name} declares no writers; it needs one")
        self._openers.append(event)
        self.serve((event.run_id, event.name))

    def wait_for(self, key: StorageKey) -> bool:
        """Whether somebody waits to open it."""
        return any((opener.run_id, opener.name) == key for opener in self._openers)

    def lose(self, participant: Participant) -> None:
        """A participant died: it no longer waits."""
        self._openers = [o for o in self._openers if o.origin.participant != participant]

    def close_run(self, run_id: RunId) -> None:
        """Refuse whoever waits for a storage of the run."""
        for opener in [o for o in self._openers if o.run_id == run_id]:
            self._openers.remove(opener)
            error = UnknownRun(f"run {run_id} was closed", run_id=run_id)
            self._outbox.add(Refuse(origin=opener.origin, error=error))

    def cancel(self, origin: Origin) -> bool:
        """Take back a waiting open. Returns whether there was one."""
        before = len(self._openers)
        self._openers = [o for o in self._openers if o.origin != origin]
        return len(self._openers) < before

    def creation_dropped(self, request: RoomRequest) -> None:
        """A creator no longer waits for room; another opener may create in its place."""
        for key, event in list(self._creating.items()):
            if event.origin == request.origin:
                del self._creating[key]
                self.serve(key)

    def expire(self, now_ns: int) -> None:
        """Refuse the openers whose deadline has passed."""
        for opener in [o for o in self._openers if o.deadline_ns <= now_ns]:
            self._openers.remove(opener)
            text = f"storage {opener.name} of run {opener.run_id} was not created in time"
            creating = self._creating.get((opener.run_id, opener.name))
            if creating is not None:
                text += (
                    f": {creating.origin.participant} waits for room for it\n{self._rooms.table()}"
                )
            storage = self._find((opener.run_id, opener.name))
            if storage is not None:
                text = (
                    f"storage {opener.name} of run {opener.run_id} is {storage.describe()} and was "
                    f"not restored in time\n{self._rooms.table()}"
                )
            self._outbox.add(Refuse(origin=opener.origin, error=BrokerTimeout(text)))

    def validate(self) -> None:
        """Check the invariants; for tests."""
        for opener in self._openers:
            key = (opener.run_id, opener.name)
            storage = self._find(key)
            assert storage is None or not storage.resident
            assert opener.create is None or key in self._creating or storage is not None
        for key, event in self._creating.items():
            assert self._find(key) is None
            assert any(request.origin == event.origin for request in self._rooms.waiting)

    def serve(self, key: StorageKey) -> None:
        """Attach everybody if the storage is there; else let the first creator create it.

        What is spilled has to come back before anybody can map it; whoever may not open it is told
        at once.
        """
        openers = [o for o in self._openers if (o.run_id, o.name) == key]
        storage = self._find(key)
        if storage is not None:
            for opener in openers:
                self._attach(storage, opener)
            return
        creators = [opener for opener in openers if opener.create is not None]
        if creators and key not in self._creating:
            self._openers.remove(creators[0])
            self._creating[key] = creators[0]
            self._request_room(key, creators[0])

    def _request_room(self, key: StorageKey, event: OpenStorage) -> None:
        assert event.create is not None
        room = self._rooms.place(event.origin.participant, event.create.placement)

        def refuse(error: RollplexError) -> None:
            self._outbox.add(Refuse(origin=event.origin, error=error))
            self.creation_dropped(request)

        request = RoomRequest(
            origin=event.origin,
            run_id=event.run_id,
            epoch=None,
            what=f"storage {event.name}",
            size_bytes=room.rounded(layout(event.create.tensors).size_bytes),
            deadline_ns=event.deadline_ns,
            grant=lambda: self._create(key, event, room.device, request.size_bytes),
            refuse=refuse,
        )
        room.request(request, wait=True)

    def _create(self, key: StorageKey, event: OpenStorage, device: str, size_bytes: int) -> None:
        del self._creating[key]
        storage = self._make(event, device, size_bytes)
        self._outbox.add(
            CreateMemory(
                generation=storage.generation,
                device=device,
                size_bytes=size_bytes,
                name=storage.name,
                zeroed=True,
            )
        )
        self._reply(storage, event.origin, created=True)
        self.serve(key)

    def _attach(self, storage: Storage, event: OpenStorage) -> None:
        try:
            if event.create is not None and event.create != storage.spec:
                raise StorageMismatch(
                    f"storage {storage.name} of run {storage.run_id} exists, made by "
                    f"{storage.creator}, and {_difference(storage.spec, event.create)}"
                )
            _require_declared(storage.name, storage.spec, event.origin.participant)
        except RollplexError as error:
            self._openers.remove(event)
            self._outbox.add(Refuse(origin=event.origin, error=error))
            return
        if storage.resident:
            self._openers.remove(event)
            self._reply(storage, event.origin, created=False)

    def _reply(self, storage: Storage, origin: Origin, *, created: bool) -> None:
        storage.give_to(origin.participant)
        self._outbox.add(
            ReplyStorageOpened(
                origin=origin,
                storage_id=storage.storage_id,
                handle=storage.handle(origin.participant),
                created=created,
                version=storage.version,
                torn=bool(storage.torn),
                spillable=storage.spillable,
            )
        )


def _require_declared(name: str, spec: StorageSpec, participant: Participant) -> None:
    if participant not in spec.readers and participant not in spec.writers:
        raise NotDeclared(
            f"{participant} is neither reader nor writer of storage {name}; readers: "
            f"{names(spec.readers)}; writers: {names(spec.writers)}"
        )


def _difference(existing: StorageSpec, wanted: StorageSpec) -> str:
    for attribute in ("residency", "placement", "readers", "writers"):
        have, want = getattr(existing, attribute), getattr(wanted, attribute)
        if have != want:
            return f"its {attribute} are {have}, not {want}"
    theirs = {tensor.name: tensor for tensor in existing.tensors}
    for tensor in wanted.tensors:
        if theirs.get(tensor.name) != tensor:
            return f"has for {tensor.name}: {theirs.get(tensor.name)}, not {tensor}"
    return f"has {len(existing.tensors)} tensors, not {len(wanted.tensors)}"
