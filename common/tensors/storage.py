"""Run-scoped storages as a process sees them, and the holds on them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from common.ids import WeightsVersion
from common.tensors.errors import StorageMisuse
from common.tensors.intake import bring_back
from common.tensors.spec import Placement, Residency
from protos.rollplex.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from types import TracebackType

    from common.ids import Epoch, Participant
    from common.tensors.connection import Connection
    from common.tensors.device import DeviceBytes
    from common.tensors.mapping import Mapping
    from common.tensors.parking import Parking
    from common.tensors.spec import TensorSpec

_PUBLISH_S = 10.0


class HoldKind(StrEnum):
    """What a hold on a storage allows."""

    READ = "read"
    """Read one version, beside other readers."""
    WRITE = "write"
    """Replace the contents; alone. Ends by publishing a version."""
    EXCLUSIVE = "exclusive"
    """Read and change the contents in place; alone. No version: accumulators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSpec:
    """What a storage consists of, and who may do what with it."""

    tensors: tuple[TensorSpec, ...]
    readers: tuple[Participant, ...]
    """May take READ holds, beside the writers."""
    writers: tuple[Participant, ...]
    """May take READ, WRITE and EXCLUSIVE holds; their mapping is writable."""
    residency: Residency = Residency.PINNED
    placement: Placement = Placement.DEVICE


class Hold:
    """A hold on a storage. As a context manager it is released at the end of the block.

    Attributes:
        kind: what it allows.
        version: READ: the version that it reads; WRITE: the one that it will publish;
            EXCLUSIVE: 0.
        dirty: EXCLUSIVE: a holder died, in an older epoch, while it changed the contents, and
            nobody has released an exclusive hold since: zero the accumulator.
    """

    def __init__(
        self,
        connection: Connection,
        storage: Storage,
        kind: HoldKind,
        held: pb.StorageHeld,
        parking: Parking | None,
        *,
        passing: bool,
    ) -> None:
        self.kind = kind
        self.version = WeightsVersion(held.version)
        self.dirty = held.dirty
        self._id = held.hold_id
        self._connection = connection
        self._storage = storage
        self._parking = parking
        self._passing = passing
        self._open = True

    @property
    def held(self) -> bool:
        """Whether this process still holds it."""
        return self._open

    def release(self, *, untouched: bool = False) -> None:
        """Let go. One-way; any thread; idempotent.

        Args:
            untouched: WRITE: nothing was written, so the old version is still whole. Without it
                a WRITE hold that was not published leaves the storage torn.
        """
        if self._open:
            self._end()
            message = pb.ReleaseStorage(hold_id=self._id, untouched=untouched)
            self._connection.tell(pb.BrokerRequest(release_storage=message))

    async def publish(self) -> None:
        """End a WRITE hold: the storage is readable at the hold's version.

        Raises:
            StorageMisuse: not a WRITE hold, or let go before.
            BrokerGone: the connection has ended.
        """
        if self.kind is not HoldKind.WRITE or not self._open:
            raise StorageMisuse(
                f"a {self.kind} hold on {self._storage.name} (held: {self._open}) was to be "
                "published; only a WRITE hold that is held can be"
            )
        request = pb.BrokerRequest(publish_storage=pb.PublishStorage(hold_id=self._id))
        await self._connection.ask(request, timeout_s=_PUBLISH_S)
        self._end()
        self._storage.version = self.version
        self._storage.torn = False

    def _end(self) -> None:
        self._open = False
        if self._parking is not None:
            self._parking.leave(passing=self._passing)

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class Storage:
    """A storage, mapped for as long as this object or a view of its bytes lives.

    Attributes:
        name: such as ``policy.weights``.
        created: this process made it; its contents are zero.
        version: newest version that this process knows of; None: none was published.
        torn: a writer was lost while it wrote, when this process last heard of it.
        spillable: it may be parked.
    """

    def __init__(self, connection: Connection, mapping: Mapping, opened: pb.StorageOpened) -> None:
        self.name = mapping.name
        self.created = opened.created
        self.version = WeightsVersion(opened.version) if opened.HasField("version") else None
        self.torn = opened.torn
        self.spillable = opened.spillable
        self._id = opened.storage_id
        self._connection = connection
        self._mapping = mapping

    @property
    def device(self) -> str:
        """Where it lies: ``cpu``, or a GPU's UUID."""
        return self._mapping.device

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The tensors by name, in the order in which they lie."""
        return self._mapping.specs

    @property
    def writable(self) -> bool:
        """Whether this process is among the writers."""
        return self._mapping.writable

    def spec(self, name: str) -> TensorSpec:
        """What the tensor is. Raises LeaseMisuse for a name that is not there."""
        return self._mapping.spec(name)

    def buffer(self, name: str) -> memoryview:
        """The tensor's bytes, zero-copy, at an address that stays; writable for writers.

        The bytes mean something only under a hold. Raises LeaseMisuse for an unknown name, or if
        it lies on a GPU.
        """
        return self._mapping.view(name)

    def device_buffer(self, name: str) -> DeviceBytes:
        """The tensor's bytes on a GPU, zero-copy, at an address that stays. For writers to write.

        A hold may be let go, or published, only when the kernels that used it have ended: see
        `cuda_events.finished`. Raises LeaseMisuse for an unknown name, or if it lies in host
        memory.
        """
        return self._mapping.device_view(name)

    async def hold_read(
        self, version: WeightsVersion, *, timeout_s: float = 60.0, passing: bool = False
    ) -> Hold:
        """Wait until `version` is readable, and keep it so.

        Args: passing: the caller calls `park_again` after the hold's end.

        Raises:
            StaleVersion: the storage is past it.
            StorageTorn: the contents are undefined and nobody is writing them anew.
            NotDeclared: this process is neither reader nor writer.
            BrokerTimeout: it was not published in time.
        """
        hold = await self._hold(
            HoldKind.READ, version=version, timeout_s=timeout_s, passing=passing
        )
        self.version = hold.version
        self.torn = False
        return hold

    async def hold_write(self, next_version: WeightsVersion, *, timeout_s: float = 60.0) -> Hold:
        """Wait until every holder has let go, then be the only one, to write `next_version`.

        Any version may be written, an older one too (after a return to a checkpoint).

        Raises:
            NotDeclared: this process is not a writer.
            BrokerTimeout: the message names who still holds it.
        """
        return await self._hold(HoldKind.WRITE, version=next_version, timeout_s=timeout_s)

    async def hold_exclusive(self, epoch: Epoch, *, timeout_s: float = 60.0) -> Hold:
        """Wait for one's turn, first come first served, then be the only one.

        Raises:
            StaleLease: the epoch has ended.
            StorageTorn: a holder died in this epoch while it changed the contents.
            NotDeclared: this process is not a writer.
            BrokerTimeout: the message names who still holds it.
        """
        return await self._hold(HoldKind.EXCLUSIVE, epoch=epoch, timeout_s=timeout_s)

    def park(self) -> bool:
        """Take a spillable storage out of this process's memory until it is held again.

        When every participant that has opened it has parked it, its contents go to the host's
        memory. Tensors of it stay and are good again, at their addresses, under the next hold;
        until then touching one ends the process with a memory fault. Blocks until no kernel of
        this process runs; any thread; idempotent.

        Returns: False, with nothing done, while this process holds it or asks to, and for a storage
            that is not spillable or was closed.
        """
        parking = self._parking
        return parking is not None and parking.park(self._tell_parked)

    def park_again(self) -> None:
        """Park it, unless others in this process have used or expected it since it was parked.

        After a hold in passing, which may have brought it back. Blocks as `park` does; any thread.
        """
        if self._parking is not None:
            self._parking.park_again(self._tell_parked)

    def prefetch(self) -> None:
        """It will be held soon: bring parked contents back now. One-way; any thread."""
        if self.spillable:
            if self._parking is not None:
                self._parking.expect()
            message = pb.PrefetchStorage(storage_id=self._id)
            self._connection.tell(pb.BrokerRequest(prefetch_storage=message))

    def close(self) -> None:
        """Forget the mapping; it ends when the last view is gone. The storage itself stays."""
        self._mapping.drop()

    async def _hold(
        self,
        kind: HoldKind,
        *,
        timeout_s: float,
        version: int = 0,
        epoch: int = 0,
        passing: bool = False,
    ) -> Hold:
        message = pb.HoldStorage(
            storage_id=self._id,
            hold=_KINDS[kind],
            version=version,
            epoch=epoch,
            timeout_ms=round(timeout_s * 1000),
        )
        pages = self._mapping.parkable if self.spillable else None
        parking = self._parking
        if parking is not None:
            parking.enter(passing=passing)
        try:
            answer = await self._connection.ask(
                pb.BrokerRequest(hold_storage=message), timeout_s=timeout_s, undo=self._undo_hold
            )
            try:
                await bring_back(answer, pages)
            except BaseException:
                self._undo_hold(answer.reply)
                raise
        except BaseException:
            if parking is not None:
                parking.leave(passing=passing)
            raise
        held = answer.reply.storage_held
        return Hold(self._connection, self, kind, held, parking, passing=passing)

    @property
    def _parking(self) -> Parking | None:
        """None: it stays where it is."""
        pages = self._mapping.parkable if self.spillable else None
        return None if pages is None else pages.parking

    def _undo_hold(self, reply: pb.BrokerReply) -> None:
        message = pb.ReleaseStorage(hold_id=reply.storage_held.hold_id, untouched=True)
        self._connection.tell(pb.BrokerRequest(release_storage=message))
        pages = self._mapping.parkable
        if pages is not None and pages.parking is not None and pages.parking.parked:
            # The broker took it that this process would map what came with the hold.
            self._tell_parked()

    def _tell_parked(self) -> None:
        self._connection.tell(parked(self._id))


def parked(storage_id: int) -> pb.BrokerRequest:
    """What tells the broker that this process has no memory of a storage mapped."""
    return pb.BrokerRequest(park_storage=pb.ParkStorage(storage_id=storage_id))


_KINDS: dict[HoldKind, pb.StorageHold.ValueType] = {
    HoldKind.READ: pb.STORAGE_HOLD_READ,
    HoldKind.WRITE: pb.STORAGE_HOLD_WRITE,
    HoldKind.EXCLUSIVE: pb.STORAGE_HOLD_EXCLUSIVE,
}


def hold_kind_from_proto(value: int) -> HoldKind:
    """Read the wire value. Raises StorageMisuse for one that is not known."""
    for kind, wire in _KINDS.items():
        if wire == value:
            return kind
    raise StorageMisuse(f"storage hold kind {value}; legal are {sorted(_KINDS.values())}")
