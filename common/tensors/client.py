"""A process's side of the memory broker's data plane. Needs no torch.

Awaited calls belong to the event loop that connected. One-way calls (`seal`, `abandon`, `release`,
`report_held`) may come from any thread. All leases and holds of a process end with its connection.
Children have to be spawned, not forked: a forked one keeps the connection open, and so its parent's
death unseen.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from common.ids import Epoch, LeaseId
from common.tensors.connection import Connection
from common.tensors.device import mapped_storage
from common.tensors.intake import SharedMemory, map_all, map_storage, shared_memory
from common.tensors.lease import Claim, Lease
from common.tensors.spec import Placement, Residency
from common.tensors.storage import Storage, parked
from common.tensors.wire import specs_to_proto
from protos.rollplex.v1 import broker_pb2 as pb
from protos.rollplex.v1 import common_pb2

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from common.ids import GroupId, Incarnation, Participant, RunId
    from common.tensors.host import HostPages
    from common.tensors.mapping import Mapping
    from common.tensors.reaper import CudaEvent
    from common.tensors.spec import Held, TensorSpec
    from common.tensors.storage import StorageSpec

_CONTROL_S = 10.0
"""Deadline of requests that the broker answers at once."""


class BrokerClient:
    """One participant's connection to its node's broker.

    Attributes:
        participant: who this process is; leases are declared for it.
        broker_incarnation: which life of the broker this is.
        device: where `device` placement lies: ``cpu``, or a GPU's UUID.
        capacity_bytes: the device's budget for all leases, storages and reservations; 0: the
            broker has no memory of it.
        copies_bytes: budget in the host's memory for contents that are spilled.
    """

    def __init__(self, connection: Connection, participant: Participant, joined: pb.Joined) -> None:
        self.participant = participant
        self.broker_incarnation = joined.broker_incarnation
        self.device = joined.device
        self.capacity_bytes = joined.capacity_bytes
        self.copies_bytes = joined.copies_bytes
        self._connection = connection
        self._claims: dict[tuple[LeaseId, bool], Claim] = {}
        self._parkable: weakref.WeakValueDictionary[int, HostPages] = weakref.WeakValueDictionary()

    @classmethod
    async def connect(
        cls,
        socket_path: Path,
        participant: Participant,
        incarnation: Incarnation,
        *,
        device: str = "",
        timeout_s: float = 10.0,
    ) -> BrokerClient:
        """Join the node. An older connection of the same participant is ended.

        Args:
            incarnation: of this process.
            device: UUID of the GPU that it computes on; empty: the node's first, if it has one.
            timeout_s: how long to wait for a broker that is not there yet.

        Raises:
            BrokerGone: no broker answered in time.
        """
        connection = await Connection.open(socket_path, timeout_s=timeout_s)
        join = pb.Join(
            participant=common_pb2.Participant(service=participant.service, rank=participant.rank),
            pid=os.getpid(),
            incarnation=incarnation,
            device=device,
        )
        try:
            answer = await connection.ask(pb.BrokerRequest(join=join), timeout_s=_CONTROL_S)
        except BaseException:
            await connection.close()
            raise
        return cls(connection, participant, answer.reply.joined)

    @property
    def closed(self) -> asyncio.Event:
        """Set when the connection has ended, by either side."""
        return self._connection.closed

    @property
    def closed_reason(self) -> str:
        """Why the connection ended; empty while it has not."""
        return self._connection.closed_reason

    async def close(self) -> None:
        """End the connection and every lease and hold with it. Idempotent."""
        await self._connection.close()

    async def allocate(
        self,
        *,
        run_id: RunId,
        epoch: Epoch,
        group: GroupId | None,
        name: str,
        tensors: Sequence[TensorSpec],
        consumers: Sequence[Participant],
        residency: Residency = Residency.PHASE,
        placement: Placement = Placement.DEVICE,
        zero: bool = False,
        next_use: str = "",
        wait: bool = True,
        timeout_s: float = 60.0,
    ) -> Lease:
        """Get memory to fill for others. Host memory is zero, a GPU's undefined.

        Args:
            group: None: about the whole step.
            name: tensor class, such as ``policy.prefix_kv``; the ledger shows it.
            consumers: each may acquire it once; the last one's release frees it.
            placement: where it is to lie.
            zero: memory of a GPU has to be zero too.
            next_use: task that will read it first; the ledger shows it.
            wait: False: refuse at once instead of waiting for room.

        Raises:
            ArenaFull: no room, and waiting was not wanted or cannot help; it has the ledger.
            BrokerTimeout: no room within `timeout_s`; it has the ledger too.
            StaleLease: the epoch is not the current one of the run.
            InvalidArgument: no consumers, no tensors, or repeated names.
            BrokerGone: the connection ended.
            CudaDriverError: the GPU's memory cannot be mapped here.
        """
        request = pb.Allocate(
            run_id=run_id,
            epoch=epoch,
            group=group,
            name=name,
            tensors=specs_to_proto(tensors),
            consumers=[str(consumer) for consumer in consumers],
            residency=residency,
            placement=placement,
            next_use=next_use,
            wait=wait,
            timeout_ms=round(timeout_s * 1000),
        )
        answer = await self._connection.ask(
            pb.BrokerRequest(allocate=request), timeout_s=timeout_s, undo=self._undo_allocate
        )
        allocated = answer.reply.allocated
        try:
            mappings = await map_all(answer, [allocated.handle], zero=zero)
            return self._lease(
                LeaseId(allocated.lease_id), allocated.handle, mappings[0], producer=True
            )
        except BaseException:
            self._undo_allocate(answer.reply)
            raise

    async def acquire(
        self, lease_ids: Sequence[LeaseId], *, epoch: Epoch, timeout_s: float = 60.0
    ) -> list[Lease]:
        """Wait until all are sealed, then hold them, to read only; all or none.

        Raises:
            StaleLease: one has ended, or the epoch has.
            NotDeclared: this process is not among one's consumers.
            LeaseMisuse: acquired before, named twice, or more than fit a request.
            UnknownLease: no lease of that number.
            BrokerTimeout: not sealed in time; the message names the producers.
            BrokerGone: the connection ended.
        """
        if not lease_ids:
            return []
        request = pb.Acquire(lease_ids=lease_ids, epoch=epoch, timeout_ms=round(timeout_s * 1000))
        answer = await self._connection.ask(
            pb.BrokerRequest(acquire=request),
            timeout_s=timeout_s,
            undo=lambda _: self._release_ids(lease_ids),
        )
        handles = answer.reply.acquired.handles
        try:
            mappings = await map_all(answer, handles)
            return [
                self._lease(lease_id, handle, mapping, producer=False)
                for lease_id, handle, mapping in zip(lease_ids, handles, mappings, strict=True)
            ]
        except BaseException:
            self._release_ids(lease_ids)
            raise

    def release(self, leases: Iterable[Lease], *, after: CudaEvent | None = None) -> None:
        """Let go of several leases; see `Lease.release`."""
        for lease in leases:
            lease.release(after=after)

    def end_epoch(self, epoch: Epoch) -> int:
        """Let go of every lease of this and older epochs: releases, or abandons what is unsealed.

        For an aborted step: call it once nothing of the epoch runs any more.

        Returns: how many leases were still held.
        """
        claims = [claim for claim in list(self._claims.values()) if claim.epoch <= epoch]
        return sum(claim.close() for claim in claims)

    @property
    def held_leases(self) -> list[LeaseId]:
        """Leases that this process holds, as producer or consumer, sorted."""
        return sorted(lease_id for lease_id, _ in list(self._claims))

    async def open_storage(
        self,
        run_id: RunId,
        name: str,
        *,
        create: StorageSpec | None = None,
        timeout_s: float = 60.0,
    ) -> Storage:
        """Create a storage of the run, or attach to it; an attacher waits for the creator.

        Args:
            create: None: only attach. An existing storage has to equal it.

        Raises:
            StorageMismatch: it exists and differs from `create`.
            NotDeclared: this process is neither reader nor writer of it.
            ArenaFull: there will never be room for it.
            UnknownRun: the run is not open on this node.
            BrokerTimeout: nobody created it in time, or there was no room in time.
            BrokerGone: the connection ended.
            CudaDriverError: the GPU's memory cannot be mapped here.
        """
        request = pb.OpenStorage(run_id=run_id, name=name, timeout_ms=round(timeout_s * 1000))
        if create is not None:
            request.create.CopyFrom(
                pb.StorageSpec(
                    tensors=specs_to_proto(create.tensors),
                    residency=create.residency,
                    placement=create.placement,
                    readers=[str(reader) for reader in create.readers],
                    writers=[str(writer) for writer in create.writers],
                )
            )
        answer = await self._connection.ask(
            pb.BrokerRequest(open_storage=request), timeout_s=timeout_s, undo=self._undo_open
        )
        opened = answer.reply.storage_opened
        try:
            mapping = await map_storage(answer, opened, self._parkable)
        except BaseException:
            self._undo_open(answer.reply)
            raise
        return Storage(self._connection, mapping, opened)

    async def share_storage(
        self, run_id: RunId, name: str, *, timeout_s: float = 60.0
    ) -> SharedMemory:
        """A descriptor of a storage's memory, for a child process to map; it is not mapped here.

        Raises:
            LeaseMisuse: the storage may be spilled, or its memory has no descriptor.
            NotDeclared, UnknownRun, BrokerTimeout, BrokerGone: as `open_storage`.
        """
        request = pb.OpenStorage(run_id=run_id, name=name, timeout_ms=round(timeout_s * 1000))
        answer = await self._connection.ask(
            pb.BrokerRequest(open_storage=request), timeout_s=timeout_s, undo=self._undo_open
        )
        return shared_memory(answer)

    async def reserve(
        self,
        run_id: RunId,
        name: str,
        size_bytes: int,
        *,
        placement: Placement = Placement.DEVICE,
        timeout_s: float | None = None,
    ) -> None:
        """Count memory of this process's own allocator in the ledger; 0 gives it back.

        A second call of the same name and placement replaces the first.

        Args:
            timeout_s: longest wait for room; None: refused if there is none now.
        Raises:
            ArenaFull: no room, or never so much; the message has the ledger.
            BrokerTimeout: no room in time.
            UnknownRun: the run is not open on this node.
            BrokerGone: the connection ended.
        """
        request = pb.Reserve(run_id=run_id, name=name, bytes=size_bytes, placement=placement)
        if timeout_s is not None:
            request.timeout_ms = max(1, round(timeout_s * 1000))
        await self._connection.ask(
            pb.BrokerRequest(reserve=request),
            timeout_s=_CONTROL_S if timeout_s is None else timeout_s,
        )

    def shrink_reservation(
        self, run_id: RunId, name: str, size_bytes: int, *, away_bytes: int
    ) -> None:
        """Reserve less on this process's device, for a while. Any thread; waits for nothing.

        Args:
            away_bytes: that will be reserved beside it in each step: leases leave room for it.
        """
        request = pb.Reserve(
            run_id=run_id,
            name=name,
            bytes=size_bytes,
            placement=Placement.DEVICE,
            away_bytes=away_bytes,
        )
        self._connection.tell(pb.BrokerRequest(reserve=request))

    def report_held(self, name: Held, size_bytes: int) -> None:
        """Tell the ledger what this process has taken of its device itself; 0: nothing.

        Never refused; replaces what was told before under this name. Any thread; waits for nothing.
        """
        report = pb.ReportHeld(name=name, bytes=size_bytes)
        self._connection.tell(pb.BrokerRequest(report_held=report))

    async def room_beside(self, name: Held, size_bytes: int) -> int:
        """Tell as `report_held` does, and ask what is left.

        Returns: bytes of the budget of this process's device that nobody has and nobody waits for.
        Raises:
            InvalidArgument: the broker has no memory of that device.
            BrokerGone: the connection ended.
        """
        report = pb.ReportHeld(name=name, bytes=size_bytes)
        answer = await self._connection.ask(
            pb.BrokerRequest(report_held=report), timeout_s=_CONTROL_S
        )
        return answer.reply.room.free_bytes

    def _lease(
        self, lease_id: LeaseId, handle: pb.TensorHandle, mapping: Mapping, *, producer: bool
    ) -> Lease:
        return Lease(
            mapping,
            self._claim(lease_id, Epoch(handle.epoch), mapping, producer=producer),
            generation=handle.generation,
            producer=producer,
        )

    def _claim(self, lease_id: LeaseId, epoch: Epoch, mapping: Mapping, *, producer: bool) -> Claim:
        key = (lease_id, producer)
        claim = Claim(
            mapping,
            lease_id=lease_id,
            epoch=epoch,
            tell=self._connection.tell,
            left_behind=_drop_unsealed(lease_id) if producer else _release([lease_id]),
            forget=self._forgetter(key),
        )
        self._claims[key] = claim
        return claim

    def _forgetter(self, key: tuple[LeaseId, bool]) -> Callable[[], None]:
        def forget() -> None:
            self._claims.pop(key, None)

        return forget

    def _undo_allocate(self, reply: pb.BrokerReply) -> None:
        self._connection.tell(_drop_unsealed(LeaseId(reply.allocated.lease_id)))

    def _undo_open(self, reply: pb.BrokerReply) -> None:
        """This process has not mapped a storage after all: nobody is to wait for it to park."""
        opened = reply.storage_opened
        generation = opened.handle.generation
        pages = self._parkable.get(generation) or mapped_storage(generation)
        mapped = pages is not None and pages.parking is not None and not pages.parking.parked
        if opened.spillable and not mapped:
            self._connection.tell(parked(opened.storage_id))

    def _release_ids(self, lease_ids: Sequence[LeaseId]) -> None:
        self._connection.tell(_release(lease_ids))


def _release(lease_ids: Sequence[LeaseId]) -> pb.BrokerRequest:
    return pb.BrokerRequest(release=pb.Release(lease_ids=lease_ids))


def _drop_unsealed(lease_id: LeaseId) -> pb.BrokerRequest:
    reason = "its producer let go of it unsealed"
    return pb.BrokerRequest(free=pb.FreeLease(lease_ids=[lease_id], reason=reason))
