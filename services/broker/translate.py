"""The data plane's messages to and from the state's events and instructions, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.errors import InvalidArgument
from common.ids import Epoch, GroupId, LeaseId, Participant, RunId
from common.tensors.errors import ProtocolViolation
from common.tensors.spec import Held, Placement, Residency, layout
from common.tensors.storage import StorageSpec, hold_kind_from_proto
from common.tensors.wire import error_to_proto, specs_from_proto, specs_to_proto
from protos.rollplex.v1 import broker_pb2 as pb
from services.broker import events, instructions
from services.broker.events import Generation, HoldId, Origin, RequestId, StorageId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from services.broker.arena import Export
    from services.broker.ledger import LedgerView

_NS_PER_MS = 1_000_000
_BROKER = "broker/0"


def request_from_proto(message: pb.BrokerRequest, origin: Origin, *, at_ns: int) -> events.Request:
    """Read a request of a session that has joined.

    Raises:
        ProtocolViolation: a message that cannot stand here.
        InvalidArgument: a value that is not legal.
    """
    kind = message.WhichOneof("body")
    if kind is None or kind not in _READERS:
        raise ProtocolViolation(f"{origin.participant} sent {kind or 'an empty request'}")
    return _READERS[kind](getattr(message, kind), origin, at_ns)


def reply_to_proto(reply: instructions.Reply, exports: Sequence[Export] = ()) -> pb.BrokerReply:
    """The wire form of an answer; descriptors ride beside it.

    Args:
        exports: one for each of `handles_of`.
    """
    message = pb.BrokerReply(request_id=reply.origin.request)
    match reply:
        case instructions.ReplyAllocated():
            message.allocated.lease_id = reply.lease_id
            message.allocated.handle.CopyFrom(_handle(reply.handle, exports[0]))
        case instructions.ReplyAcquired():
            message.acquired.handles.extend(map(_handle, reply.handles, exports))
        case instructions.ReplyStorageOpened():
            opened = pb.StorageOpened(
                storage_id=reply.storage_id,
                handle=_handle(reply.handle, exports[0]),
                created=reply.created,
                version=reply.version,
                torn=reply.torn,
                spillable=reply.spillable,
            )
            message.storage_opened.CopyFrom(opened)
        case instructions.ReplyHeld():
            held = pb.StorageHeld(hold_id=reply.hold_id, version=reply.version, dirty=reply.dirty)
            if reply.handle is not None:
                held.handle.CopyFrom(_handle(reply.handle, exports[0]))
            message.storage_held.CopyFrom(held)
        case instructions.ReplyDone():
            message.done.SetInParent()
        case instructions.ReplyRoom():
            message.room.free_bytes = reply.free_bytes
        case instructions.Refuse():
            message.error.CopyFrom(error_to_proto(reply.error, service=_BROKER))
        case _:
            raise NotImplementedError(f"no wire form for {type(reply).__name__}")
    return message


def handles_of(reply: instructions.Reply) -> tuple[instructions.Handle, ...]:
    """The memory that an answer hands out, in order."""
    match reply:
        case instructions.ReplyAllocated() | instructions.ReplyStorageOpened():
            return (reply.handle,)
        case instructions.ReplyAcquired():
            return reply.handles
        case instructions.ReplyHeld(handle=handle) if handle is not None:
            return (handle,)
        case _:
            return ()


def ledger_to_proto(view: LedgerView, *, device: str) -> pb.Ledger:
    """The wire form of the ledger.

    Args:
        device: whose totals are the node's, for those who look at no others.
    """
    main = view.arena(device)
    return pb.Ledger(
        capacity_bytes=main.capacity_bytes,
        used_bytes=main.used_bytes,
        peak_bytes=main.peak_bytes,
        device=device,
        arenas=[
            pb.ArenaTotals(
                device=arena.device,
                capacity_bytes=arena.capacity_bytes,
                used_bytes=arena.used_bytes,
                peak_bytes=arena.peak_bytes,
                held_bytes=arena.held_bytes,
                peak_total_bytes=arena.peak_total_bytes,
                free_bytes=arena.free_bytes,
            )
            for arena in view.arenas
        ],
        entries=[
            pb.LedgerEntry(
                name=row.name,
                run_id=row.run_id or "",
                lease_id=row.lease_id,
                epoch=row.epoch,
                group=row.group,
                bytes=row.size_bytes,
                producer=str(row.producer),
                waiting_for=map(str, row.waiting_for),
                holders=map(str, row.holders),
                state=row.state,
                residency=row.residency,
                until=row.until,
                generation=row.generation or 0,
                device=row.device,
            )
            for row in view.rows
        ],
    )


def _handle(handle: instructions.Handle, export: Export) -> pb.TensorHandle:
    ipc = None
    if export.ipc is not None:
        ipc = pb.IpcHandle(handle=export.ipc.handle, offset_bytes=export.ipc.offset_bytes)
    return pb.TensorHandle(
        device=handle.device,
        size_bytes=handle.size_bytes,
        tensors=specs_to_proto(handle.specs),
        generation=handle.generation,
        epoch=handle.epoch or 0,
        name=handle.name,
        writable=handle.writable,
        ipc=ipc,
        life=handle.life,
    )


def _participants(names: Iterable[str]) -> tuple[Participant, ...]:
    participants = []
    for name in names:
        try:
            participants.append(Participant.parse(name))
        except ValueError:
            raise InvalidArgument(
                f"{name!r} names no participant; legal is service/rank, such as learner/0"
            ) from None
    return tuple(participants)


def _residency(name: str) -> Residency:
    try:
        return Residency(name)
    except ValueError:
        raise InvalidArgument(f"residency {name!r}; legal are {', '.join(Residency)}") from None


def _placement(name: str) -> Placement:
    try:
        return Placement(name or Placement.DEVICE)
    except ValueError:
        raise InvalidArgument(f"placement {name!r}; legal are {', '.join(Placement)}") from None


def _lease_ids(values: Iterable[int]) -> tuple[LeaseId, ...]:
    return tuple(map(LeaseId, values))


def _deadline_ns(at_ns: int, timeout_ms: int) -> int:
    return at_ns + timeout_ms * _NS_PER_MS


def _allocate(message: pb.Allocate, origin: Origin, at_ns: int) -> events.AllocateLease:
    return events.AllocateLease(
        origin=origin,
        at_ns=at_ns,
        run_id=RunId(message.run_id),
        epoch=Epoch(message.epoch),
        group=GroupId(message.group) if message.HasField("group") else None,
        name=message.name,
        layout=layout(specs_from_proto(message.tensors)),
        placement=_placement(message.placement),
        consumers=_participants(message.consumers),
        residency=_residency(message.residency),
        next_use=message.next_use,
        wait=message.wait,
        deadline_ns=_deadline_ns(at_ns, message.timeout_ms),
    )


def _seal(message: pb.Seal, origin: Origin, at_ns: int) -> events.SealLease:
    return events.SealLease(
        origin=origin,
        at_ns=at_ns,
        lease_id=LeaseId(message.lease_id),
        generation=Generation(message.generation),
    )


def _acquire(message: pb.Acquire, origin: Origin, at_ns: int) -> events.AcquireLeases:
    return events.AcquireLeases(
        origin=origin,
        at_ns=at_ns,
        lease_ids=_lease_ids(message.lease_ids),
        epoch=Epoch(message.epoch),
        deadline_ns=_deadline_ns(at_ns, message.timeout_ms),
    )


def _release(message: pb.Release, origin: Origin, at_ns: int) -> events.ReleaseLeases:
    return events.ReleaseLeases(origin=origin, at_ns=at_ns, lease_ids=_lease_ids(message.lease_ids))


def _free(message: pb.FreeLease, origin: Origin, at_ns: int) -> events.AbandonLeases:
    return events.AbandonLeases(
        origin=origin,
        at_ns=at_ns,
        lease_ids=_lease_ids(message.lease_ids),
        reason=message.reason,
    )


def _open_storage(message: pb.OpenStorage, origin: Origin, at_ns: int) -> events.OpenStorage:
    create = None
    if message.HasField("create"):
        create = StorageSpec(
            tensors=specs_from_proto(message.create.tensors),
            readers=_participants(message.create.readers),
            writers=_participants(message.create.writers),
            residency=_residency(message.create.residency),
            placement=_placement(message.create.placement),
        )
    return events.OpenStorage(
        origin=origin,
        at_ns=at_ns,
        run_id=RunId(message.run_id),
        name=message.name,
        create=create,
        deadline_ns=_deadline_ns(at_ns, message.timeout_ms),
    )


def _hold(message: pb.HoldStorage, origin: Origin, at_ns: int) -> events.HoldStorage:
    return events.HoldStorage(
        origin=origin,
        at_ns=at_ns,
        storage_id=StorageId(message.storage_id),
        kind=hold_kind_from_proto(message.hold),
        version=message.version,
        epoch=Epoch(message.epoch),
        deadline_ns=_deadline_ns(at_ns, message.timeout_ms),
    )


def _release_hold(message: pb.ReleaseStorage, origin: Origin, at_ns: int) -> events.ReleaseHold:
    return events.ReleaseHold(
        origin=origin, at_ns=at_ns, hold_id=HoldId(message.hold_id), untouched=message.untouched
    )


def _publish(message: pb.PublishStorage, origin: Origin, at_ns: int) -> events.PublishHold:
    return events.PublishHold(origin=origin, at_ns=at_ns, hold_id=HoldId(message.hold_id))


def _park(message: pb.ParkStorage, origin: Origin, at_ns: int) -> events.ParkStorage:
    return events.ParkStorage(origin=origin, at_ns=at_ns, storage_id=StorageId(message.storage_id))


def _prefetch(message: pb.PrefetchStorage, origin: Origin, at_ns: int) -> events.PrefetchStorage:
    return events.PrefetchStorage(
        origin=origin, at_ns=at_ns, storage_id=StorageId(message.storage_id)
    )


def _reserve(message: pb.Reserve, origin: Origin, at_ns: int) -> events.ReserveMemory:
    return events.ReserveMemory(
        origin=origin,
        at_ns=at_ns,
        run_id=RunId(message.run_id),
        name=message.name,
        placement=_placement(message.placement),
        size_bytes=message.bytes,
        away_bytes=message.away_bytes,
        deadline_ns=_deadline_ns(at_ns, message.timeout_ms) if message.timeout_ms else None,
    )


def _report_held(message: pb.ReportHeld, origin: Origin, at_ns: int) -> events.ReportHeld:
    try:
        name = Held(message.name)
    except ValueError:
        raise InvalidArgument(f"held {message.name!r}; legal are {', '.join(Held)}") from None
    return events.ReportHeld(origin=origin, at_ns=at_ns, name=name, size_bytes=message.bytes)


def _cancel(message: pb.Cancel, origin: Origin, at_ns: int) -> events.CancelRequest:
    return events.CancelRequest(origin=origin, at_ns=at_ns, cancelled=RequestId(message.request_id))


_READERS: dict[str, Callable[[Any, Origin, int], events.Request]] = {
    "allocate": _allocate,
    "seal": _seal,
    "acquire": _acquire,
    "release": _release,
    "free": _free,
    "open_storage": _open_storage,
    "hold_storage": _hold,
    "release_storage": _release_hold,
    "publish_storage": _publish,
    "park_storage": _park,
    "prefetch_storage": _prefetch,
    "reserve": _reserve,
    "report_held": _report_held,
    "cancel": _cancel,
}
