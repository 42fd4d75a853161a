"""Drives a BrokerState: short ways to say events, and a validation after each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.ids import (
    Epoch,
    GroupId,
    LeaseId,
    Participant,
    RunId,
    Service,
    StepIndex,
    WeightsVersion,
)
from common.step.plan import StepMode, StepPlan
from common.step.schedule import Schedule
from common.tensors.spec import DType, Held, Placement, Residency, TensorSpec, layout
from services.broker import events, instructions
from services.broker.events import HoldId, Origin, RequestId, SessionId, StorageId
from services.broker.rooms import ArenaSize
from services.broker.state import BrokerState

if TYPE_CHECKING:
    from common.errors import RollplexError
    from common.tensors.storage import HoldKind, StorageSpec

PAGE = 4096
GPU = "GPU-00000000-1111-2222-3333-444444444444"
GPU_PAGE = 1 << 21
RUN = RunId("run")
LEARNER = Participant(service=Service.LEARNER)
ENCODER = Participant(service=Service.PREFIX_ENCODER)
ROLLOUT = Participant(service=Service.ROLLOUT)
REFERENCE = Participant(service=Service.REFERENCE)
FAR_S = 1000.0


def plan(epoch: int, *, run_id: RunId = RUN, step: int = 0) -> StepPlan:
    return StepPlan(
        run_id=run_id,
        step=StepIndex(step),
        epoch=Epoch(epoch),
        mode=StepMode.TRAIN,
        schedule=Schedule.SERIAL,
        weights_version=WeightsVersion(0),
        groups=(),
        samples_per_group=1,
    )


def pages(count: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec(name="bytes", dtype=DType.UINT8, shape=(count * PAGE,)),)


class Driver:
    """A state with a clock and sessions. Every call returns the RequestId or what was said."""

    def __init__(
        self,
        *,
        capacity_pages: int = 8,
        gpu_pages: int = 0,
        copies_pages: int = 0,
        limit_pages: int | None = None,
        joined: tuple[Participant, ...] = (),
    ) -> None:
        """Args: limit_pages: of the GPU, or of the host if there is none."""
        page_bytes = GPU_PAGE if gpu_pages else PAGE
        limit_bytes = None if limit_pages is None else limit_pages * page_bytes
        host = ArenaSize(
            device="cpu",
            capacity_bytes=capacity_pages * PAGE,
            page_bytes=PAGE,
            limit_bytes=None if gpu_pages else limit_bytes,
        )
        gpu = ArenaSize(
            device=GPU,
            capacity_bytes=gpu_pages * GPU_PAGE,
            page_bytes=GPU_PAGE,
            limit_bytes=limit_bytes,
        )
        self.state = BrokerState(
            [host, gpu] if gpu_pages else [host], copies_bytes=copies_pages * PAGE
        )
        self.now_ns = 1_000_000_000
        self.said: list[instructions.Instruction] = []
        self.answers: dict[int, instructions.Reply] = {}
        self.memory: set[int] = set()
        self.moves: list[instructions.SpillMemory | instructions.RestoreMemory] = []
        """Under way, in the order in which they were begun."""
        self._sessions: dict[Participant, SessionId] = {}
        self._next_session = 1
        self._next_request = 1
        self.do(events.RunOpened, run_id=RUN, epoch=Epoch(0))
        for participant in joined or (LEARNER, ENCODER, ROLLOUT, REFERENCE):
            self.join(participant)

    def do(
        self, what: type[events.BrokerEvent], /, **fields: Any
    ) -> list[instructions.Instruction]:
        said = self.state.handle(what(at_ns=self.now_ns, **fields))
        self.state.validate()
        due_ns = self.state.next_deadline_ns()
        assert due_ns is None or due_ns > self.now_ns
        for instruction in said:
            match instruction:
                case instructions.CreateMemory(generation=generation):
                    assert generation not in self.memory
                    self.memory.add(generation)
                case instructions.FreeMemory(generation=generation):
                    self.memory.remove(generation)
                case instructions.SpillMemory() | instructions.RestoreMemory():
                    assert instruction.generation in self.memory
                    self.moves.append(instruction)
                case instructions.Reply(origin=origin) if origin.request:
                    assert origin.request not in self.answers, "answered twice"
                    self.answers[origin.request] = instruction
        self.said.extend(said)
        return said

    def ask(self, who: Participant, what: type[events.Request], /, **fields: Any) -> int:
        request = self._next_request
        self._next_request += 1
        origin = Origin(session=self._sessions[who], request=RequestId(request), participant=who)
        self.do(what, origin=origin, **fields)
        return request

    def tell(self, who: Participant, what: type[events.Request], /, **fields: Any) -> None:
        origin = Origin(session=self._sessions[who], request=RequestId(0), participant=who)
        for instruction in self.do(what, origin=origin, **fields):
            if isinstance(instruction, instructions.Refuse) and instruction.origin == origin:
                raise instruction.error

    def answer(self, request: int) -> Any:
        """The reply to a request; raises what it was refused with; None: it waits."""
        reply = self.answers.get(request)
        if isinstance(reply, instructions.Refuse):
            raise reply.error
        return reply

    def waits(self, request: int) -> bool:
        return request not in self.answers

    def refusal(self, request: int) -> RollplexError:
        reply = self.answers[request]
        assert isinstance(reply, instructions.Refuse), reply
        return reply.error

    def hold_own(self, who: Participant, size_pages: int, name: Held = Held.ALLOCATOR) -> None:
        page_bytes = PAGE if self.state.default_device == "cpu" else GPU_PAGE
        self.tell(who, events.ReportHeld, name=name, size_bytes=size_pages * page_bytes)

    def pass_time(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)
        self.do(events.DeadlinePassed)

    def join(self, who: Participant, device: str = "") -> None:
        self._sessions[who] = SessionId(self._next_session)
        self._next_session += 1
        self.do(
            events.ParticipantConnected,
            session=self._sessions[who],
            participant=who,
            pid=1,
            incarnation="life",
            device=device,
        )

    def kill(self, who: Participant) -> None:
        self.do(events.ParticipantLost, session=self._sessions.pop(who), reason="killed")

    def begin(self, epoch: int, *, run_id: RunId = RUN) -> list[instructions.Instruction]:
        return self.do(events.StepRequested, plan=plan(epoch, run_id=run_id))

    def abort(self, epoch: int, reason: str = "a test") -> None:
        self.do(events.AbortRequested, run_id=RUN, epoch=Epoch(epoch), reason=reason)

    def allocate(
        self,
        who: Participant,
        *consumers: Participant,
        epoch: int = 1,
        size_pages: int = 1,
        wait: bool = True,
        timeout_s: float = FAR_S,
        name: str = "kv",
        placement: Placement = Placement.DEVICE,
    ) -> int:
        return self.ask(
            who,
            events.AllocateLease,
            run_id=RUN,
            epoch=Epoch(epoch),
            group=GroupId(7),
            name=name,
            layout=layout(pages(size_pages)),
            placement=placement,
            consumers=consumers,
            residency=Residency.PHASE,
            next_use="decode",
            wait=wait,
            deadline_ns=self.deadline(timeout_s),
        )

    def lease(self, who: Participant, *consumers: Participant, **fields: Any) -> LeaseId:
        reply = self.answer(self.allocate(who, *consumers, **fields))
        assert isinstance(reply, instructions.ReplyAllocated)
        return reply.lease_id

    def sealed(self, who: Participant, *consumers: Participant, **fields: Any) -> LeaseId:
        lease_id = self.lease(who, *consumers, **fields)
        self.seal(who, lease_id)
        return lease_id

    def seal(self, who: Participant, lease_id: LeaseId, generation: int | None = None) -> None:
        if generation is None:
            rows = self.state.ledger().rows
            known = [row.generation for row in rows if row.lease_id == lease_id]
            generation = known[0] if known else 0
        self.tell(who, events.SealLease, lease_id=lease_id, generation=generation)

    def acquire(
        self, who: Participant, *lease_ids: LeaseId, epoch: int = 1, timeout_s: float = FAR_S
    ) -> int:
        return self.ask(
            who,
            events.AcquireLeases,
            lease_ids=lease_ids,
            epoch=Epoch(epoch),
            deadline_ns=self.deadline(timeout_s),
        )

    def release(self, who: Participant, *lease_ids: LeaseId) -> None:
        self.tell(who, events.ReleaseLeases, lease_ids=lease_ids)

    def abandon(self, who: Participant, *lease_ids: LeaseId) -> None:
        self.tell(who, events.AbandonLeases, lease_ids=lease_ids, reason="group dropped")

    def open(
        self,
        who: Participant,
        create: StorageSpec | None = None,
        timeout_s: float = FAR_S,
        *,
        name: str = "weights",
    ) -> int:
        return self.ask(
            who,
            events.OpenStorage,
            run_id=RUN,
            name=name,
            create=create,
            deadline_ns=self.deadline(timeout_s),
        )

    def hold(
        self,
        who: Participant,
        storage: StorageId,
        kind: HoldKind,
        *,
        version: int = 0,
        epoch: int = 1,
        timeout_s: float = FAR_S,
    ) -> int:
        return self.ask(
            who,
            events.HoldStorage,
            storage_id=storage,
            kind=kind,
            version=version,
            epoch=Epoch(epoch),
            deadline_ns=self.deadline(timeout_s),
        )

    def let_go(self, who: Participant, hold: HoldId, *, untouched: bool = False) -> None:
        self.tell(who, events.ReleaseHold, hold_id=hold, untouched=untouched)

    def publish(self, who: Participant, hold: HoldId) -> Any:
        return self.answer(self.ask(who, events.PublishHold, hold_id=hold))

    def park(self, who: Participant, storage: StorageId) -> None:
        self.tell(who, events.ParkStorage, storage_id=storage)

    def prefetch(self, who: Participant, storage: StorageId) -> None:
        self.tell(who, events.PrefetchStorage, storage_id=storage)

    def end_move(self, which: int = 0, *, fail: bool = False) -> None:
        """A copy has ended, by default the one that was begun first."""
        move = self.moves.pop(which)
        if fail:
            self.do(events.MoveFailed, generation=move.generation, reason="no memory")
        elif isinstance(move, instructions.SpillMemory):
            self.do(events.MemorySpilled, generation=move.generation, seconds=0.5)
        else:
            self.do(events.MemoryRestored, generation=move.generation, seconds=0.25)

    def cancel(self, who: Participant, request: int) -> None:
        self.tell(who, events.CancelRequest, cancelled=RequestId(request))

    def deadline(self, timeout_s: float) -> int:
        return self.now_ns + int(timeout_s * 1e9)

    @property
    def joined(self) -> tuple[Participant, ...]:
        return tuple(self._sessions)

    @property
    def used_pages(self) -> int:
        return self.state.ledger().used_bytes // PAGE
