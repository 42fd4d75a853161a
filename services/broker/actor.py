"""Carries out what the broker's state says: memory, replies, announcements, deadlines.

One event is handled at a time, to its end, on the event loop's thread; nothing in it waits. Events
that arise while instructions are carried out (a session that breaks) are handled afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections import deque
from typing import TYPE_CHECKING

from common.actor.machine import InvalidTransition
from common.errors import RollplexError
from common.events import Event
from common.events.bodies import (
    Body,
    ContentsMoved,
    MemoryWanted,
    ParticipantDied,
    ParticipantJoined,
    StepAborted,
    StepBegan,
)
from common.ids import Epoch, Incarnation, Participant, RunId, Service, StepIndex
from common.tensors.errors import ArenaFull
from protos.rollplex.v1 import broker_pb2 as pb
from services.broker import events, instructions
from services.broker.arena import SpillingArena
from services.broker.dataplane import DataPlane
from services.broker.events import Origin, RequestId, SessionId
from services.broker.memory import Memory
from services.broker.rooms import ArenaSize
from services.broker.state import BrokerState
from services.broker.translate import handles_of, reply_to_proto, request_from_proto

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from common.step.plan import StepPlan
    from services.broker.arena import BudgetedArena, Export
    from services.broker.events import Generation
    from services.broker.ledger import LedgerView
    from services.broker.memory import CopyMeter

log = logging.getLogger(__name__)

_BROKER = Participant(service=Service.BROKER)
_NS_PER_S = 1_000_000_000


class BrokerActor:
    """See the module's text.

    Args:
        arenas: where the memory comes from, the host's first.
        copies_bytes: of the host's memory, for spilled contents; 0: nothing is spilled.
        meter: told of what is spilled and restored.
        socket_path: of the data plane.
        publish: gives an event its place in the node's order and returns the number.

    Attributes:
        incarnation: which life of the broker this is.
        failed: set when an invariant broke; the process has to end. `failure` has the cause.
    """

    def __init__(
        self,
        *,
        arenas: Sequence[BudgetedArena],
        socket_path: Path,
        publish: Callable[[Event], int],
        copies_bytes: int = 0,
        meter: CopyMeter | None = None,
    ) -> None:
        self.incarnation = Incarnation(uuid.uuid4().hex)
        self.failed = asyncio.Event()
        self.failure: BaseException | None = None
        sizes = [
            ArenaSize(
                device=each.arena.device,
                capacity_bytes=each.capacity_bytes,
                page_bytes=each.arena.page_bytes,
                spills=isinstance(each.arena, SpillingArena),
                limit_bytes=each.limit_bytes,
                context_bytes=each.context_bytes,
            )
            for each in arenas
        ]
        # Time since the epoch: no two brokers of a node have generations in common.
        self._state = BrokerState(
            sizes, copies_bytes=copies_bytes, first_generation=time.time_ns() // 1000
        )
        self._plane = DataPlane(socket_path, self)
        self._publish = publish
        self._memory = Memory(
            [each.arena for each in arenas], ended=self._submit, broken=self._break, meter=meter
        )
        self._unmade: dict[Generation, str] = {}
        self._queue: deque[events.BrokerEvent] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns: int | None = None
        self._begun: dict[RunId, tuple[Epoch, int]] = {}

    async def start(self) -> None:
        """Listen. Raises FailedPrecondition if the socket cannot be had."""
        await self._plane.start()

    def close(self) -> None:
        """End the sessions and give all memory back. Waits for a copy that runs. Idempotent."""
        self._plane.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._memory.close()

    @property
    def device(self) -> str:
        """Where the workers compute: ``cpu``, or the UUID of the node's first GPU."""
        return self._state.default_device

    @property
    def participants(self) -> int:
        """How many participants are connected."""
        return self._state.participants

    def ledger(self, run_id: RunId | None = None) -> LedgerView:
        """Who holds how many bytes until when."""
        return self._state.ledger(run_id)

    def admits(self, event: Event) -> bool:
        """Whether an event may enter the node's order: not one of an epoch that is over."""
        return not self._state.is_over(event.run_id, event.epoch)

    def open_run(self, run_id: RunId, epoch: Epoch) -> None:
        """Make a run known. Idempotent."""
        self._order(events.RunOpened(at_ns=time.monotonic_ns(), run_id=run_id, epoch=epoch))

    def begin_step(self, plan: StepPlan) -> int:
        """Begin an epoch.

        Returns: the number of its StepBegan, the same for a repeated order.

        Raises:
            UnknownRun: the run is not open here.
            Stale: the epoch is over.
        """
        self._order(events.StepRequested(at_ns=time.monotonic_ns(), plan=plan))
        return self._begun[plan.run_id][1]

    def abort_step(self, run_id: RunId, epoch: Epoch, reason: str) -> None:
        """End an epoch without an update. Idempotent. Raises UnknownRun."""
        self._order(
            events.AbortRequested(
                at_ns=time.monotonic_ns(), run_id=run_id, epoch=epoch, reason=reason
            )
        )

    def close_run(self, run_id: RunId) -> int:
        """Forget a run and free what is its own. Idempotent. Returns the freed bytes."""
        before_bytes = self._state.ledger().used_bytes
        self._order(events.RunClosed(at_ns=time.monotonic_ns(), run_id=run_id))
        self._begun.pop(run_id, None)
        return before_bytes - self._state.ledger().used_bytes

    def joined(
        self, session: SessionId, participant: Participant, pid: int, join: pb.Join
    ) -> pb.Joined:
        """See SessionHandler."""
        self._submit(
            events.ParticipantConnected(
                at_ns=time.monotonic_ns(),
                session=session,
                participant=participant,
                pid=pid,
                incarnation=join.incarnation,
                device=join.device,
            )
        )
        device = self._state.home(participant)
        return pb.Joined(
            broker_incarnation=self.incarnation,
            device=device,
            capacity_bytes=self._state.capacity_bytes(device),
            copies_bytes=self._state.copies_bytes,
        )

    def received(
        self, session: SessionId, participant: Participant, request: pb.BrokerRequest
    ) -> None:
        """See SessionHandler."""
        origin = Origin(
            session=session, request=RequestId(request.request_id), participant=participant
        )
        try:
            event = request_from_proto(request, origin, at_ns=time.monotonic_ns())
        except RollplexError as error:
            self._carry_out(instructions.Refuse(origin=origin, error=error))
            return
        self._submit(event)

    def lost(self, session: SessionId, reason: str) -> None:
        """See SessionHandler."""
        self._submit(
            events.ParticipantLost(at_ns=time.monotonic_ns(), session=session, reason=reason)
        )

    def _order(self, event: events.BrokerEvent) -> None:
        """Handle an order of the controller; its errors are the caller's."""
        assert not self._busy
        self._busy = True
        try:
            for instruction in self._state.handle(event):
                self._carry_out(instruction)
        except InvalidTransition as error:
            self._break(error)
            raise
        finally:
            self._busy = False
        self._drain()

    def _submit(self, event: events.BrokerEvent) -> None:
        self._queue.append(event)
        if not self._busy:
            self._drain()

    def _drain(self) -> None:
        self._busy = True
        try:
            while self._queue and not self.failed.is_set():
                event = self._queue.popleft()
                for instruction in self._state.handle(event):
                    self._carry_out(instruction)
                if isinstance(event, events.MemoryFailed):
                    del self._unmade[event.generation]
        except Exception as error:  # noqa: BLE001 - the event loop would log it and go on
            self._break(error)
        finally:
            self._busy = False
        self._set_timer()

    def _break(self, error: Exception) -> None:
        """The books cannot be trusted any more: have the process ended."""
        log.error("the broker's state is broken", exc_info=error)
        self.failure = error
        self.failed.set()

    def _set_timer(self) -> None:
        due_ns = self._state.next_deadline_ns()
        if due_ns == self._timer_ns and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_ns = due_ns
        if due_ns is not None:
            loop = asyncio.get_running_loop()
            delay_s = max(0.0, (due_ns - time.monotonic_ns()) / _NS_PER_S)
            self._timer = loop.call_later(delay_s, self._deadline)

    def _deadline(self) -> None:
        self._timer = None
        self._submit(events.DeadlinePassed(at_ns=time.monotonic_ns()))

    def _carry_out(self, instruction: instructions.Instruction) -> None:
        match instruction:
            case instructions.CreateMemory():
                self._create(instruction)
            case instructions.FreeMemory():
                self._memory.free(instruction.generation)
            case instructions.SpillMemory():
                self._memory.spill(instruction.generation, copied=instruction.copied)
            case instructions.RestoreMemory():
                self._memory.restore(instruction.generation)
            case instructions.Refuse() if instruction.origin.request == 0:
                self._plane.disconnect(instruction.origin.session, str(instruction.error))
            case instructions.Reply():
                self._reply(instruction)
            case instructions.AnnounceStepBegan(plan=plan, lease_room_bytes=room):
                began = StepBegan(plan=plan, lease_room_bytes=room)
                seq = self._announce(began, plan.run_id, plan.step, plan.epoch)
                self._begun[plan.run_id] = (plan.epoch, seq)
            case instructions.AnnounceStepAborted():
                self._announce(
                    StepAborted(reason=instruction.reason),
                    instruction.run_id,
                    StepIndex(instruction.step),
                    instruction.epoch,
                )
            case instructions.AnnounceMemoryWanted(device=device, size_bytes=size_bytes):
                self._announce_everywhere(MemoryWanted(device=device, size_bytes=size_bytes))
            case instructions.AnnounceMoved():
                self._announce_moved(instruction)
            case instructions.AnnounceJoined():
                self._announce_everywhere(
                    ParticipantJoined(
                        participant=instruction.participant,
                        pid=instruction.pid,
                        incarnation=instruction.incarnation,
                    )
                )
            case instructions.AnnounceDied():
                self._announce_everywhere(
                    ParticipantDied(
                        participant=instruction.participant,
                        pid=instruction.pid,
                        incarnation=instruction.incarnation,
                        reason=instruction.reason,
                    )
                )
            case _:
                raise NotImplementedError(f"no way to carry out {type(instruction).__name__}")

    def _create(self, order: instructions.CreateMemory) -> None:
        try:
            self._memory.create(order)
        except OSError as error:
            reason = f"{order.size_bytes} bytes for {order.name} on {order.device}: {error}"
            log.warning("the system gave no memory", extra={"reason": reason})
            self._unmade[order.generation] = reason
            self._queue.append(
                events.MemoryFailed(
                    at_ns=time.monotonic_ns(), generation=order.generation, reason=reason
                )
            )

    def _reply(self, reply: instructions.Reply) -> None:
        exports: list[Export] = []
        for handle in handles_of(reply):
            if handle.generation in self._unmade:
                reason = f"the system gave no memory: {self._unmade[handle.generation]}"
                full = ArenaFull(f"{reason}\n{self._state.ledger().table()}")
                self._reply(instructions.Refuse(origin=reply.origin, error=full))
                return
            try:
                export = self._memory.export(handle.generation, writable=handle.writable)
                exports.append(export)
            except OSError as error:
                for fd in _descriptors(exports):
                    os.close(fd)
                self._plane.disconnect(reply.origin.session, f"no descriptor for it: {error}")
                return
        message = reply_to_proto(reply, exports)
        self._plane.send(reply.origin.session, message, _descriptors(exports))

    def _announce(self, body: Body, run_id: RunId, step: StepIndex, epoch: Epoch) -> int:
        return self._publish(
            Event(sender=_BROKER, run_id=run_id, step=step, epoch=epoch, body=body)
        )

    def _announce_moved(self, moved: instructions.AnnounceMoved) -> None:
        body = ContentsMoved(
            storage=moved.storage,
            device=moved.device,
            restored=moved.restored,
            size_bytes=moved.size_bytes,
            seconds=moved.seconds,
        )
        fence = self._state.fence(moved.run_id)
        self._announce(body, fence.run_id, fence.step, fence.epoch)

    def _announce_everywhere(self, body: Body) -> None:
        """To each open run as part of its epoch; without any, to the node."""
        for fence in self._state.open_runs():
            self._announce(body, fence.run_id, fence.step, fence.epoch)
        if not self._state.open_runs():
            self._announce(body, RunId(""), StepIndex(0), Epoch(0))


def _descriptors(exports: Iterable[Export]) -> tuple[int, ...]:
    return tuple(export.fd for export in exports if export.fd is not None)
