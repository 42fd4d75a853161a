"""Whole steps on a real broker's state, with events that come back late, drops and deaths.

Every task is there, with the leases that it takes, holds and gives back; what starts, ends or
arrives next is the test's choice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from common.events import bodies
from common.events.bodies import ModelRole
from common.ids import WORKERS, GroupId, LeaseId, Participant, Service
from common.step.partners import Partners
from common.step.schedule import Schedule
from common.step.tasks import Task
from common.step.view import StepView
from common.tensors.spec import Residency
from common.tensors.storage import HoldKind, StorageSpec
from services.broker.instructions import AnnounceStepBegan
from services.prefix_encoder.admission import LeaseSizes
from tests.unit.broker.driver import (
    ENCODER,
    LEARNER,
    PAGE,
    REFERENCE,
    ROLLOUT,
    Driver,
    pages,
)
from tests.unit.step.test_partners import bound
from tests.unit.step.test_schedule import event, plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.step.machine import Admits
    from services.broker.events import HoldId, StorageId

COMPUTE = (Task.PREFIX_BACKWARD, Task.POLICY_VISION, Task.POLICY_PREFIX, Task.REFERENCE_PREFIX)
"""Of the prefix-encoder: one at a time, a wait for room included."""
TASKS = (*COMPUTE, Task.PREPARE, Task.DECODE, Task.REFERENCE_SCORE, Task.RESPONSE_TRAIN)
MAKES = {
    Task.POLICY_VISION: "vision",
    Task.POLICY_PREFIX: "policy",
    Task.REFERENCE_PREFIX: "reference",
    Task.RESPONSE_TRAIN: "gradient",
}
READS = {
    Task.REFERENCE_SCORE: (REFERENCE, "reference"),
    Task.RESPONSE_TRAIN: (LEARNER, "policy"),
    Task.PREFIX_BACKWARD: (ENCODER, "gradient"),
}
PLACES = 2
"""Groups that decode at a time in a replica of the rollout."""
PEOPLE = (ENCODER, LEARNER, REFERENCE, ROLLOUT)
SIZES = LeaseSizes(
    kv_bytes_per_token=300,
    gradient_bytes_per_token=500,
    vision_bytes_per_token=100,
    page_bytes=PAGE,
    longest_tokens=60,
)


def reserve_pages(
    schedule: Schedule, tokens: list[int], *, weights_pages: int = 0, rollouts: int = 1
) -> int:
    """The least room of a step: K and V of both roles and gradients once, everybody's vision.

    In `fused`, the policy's K and V as often as groups decode at a time. In `disaggregated` nothing
    of the policy's is handed to the rollout. But for `fused`, gradients come
    when the reference's K and V have gone, and so have its weights, if these can.
    """
    longest = max(tokens) - 1
    at_once = PLACES * rollouts if schedule is Schedule.FUSED else 1
    policies = sorted(tokens, reverse=True)[:at_once]
    policy = sum(_pages(300 * (count - 1)) for count in policies)
    reference, gradient = _pages(300 * longest), _pages(500 * longest)
    match schedule:
        case Schedule.FUSED:
            chain = weights_pages + policy + reference + gradient
        case Schedule.ROLLPLEX:
            chain = max(weights_pages + policy + reference, policy + gradient)
        case Schedule.SERIAL | Schedule.DISAGGREGATED:
            chain = max(weights_pages + reference, policy + gradient)
    return chain + sum(_pages(100 * (count // 2)) for count in tokens)


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE)


@dataclass
class Play:
    """One step, through as many epochs as it takes."""

    schedule: Schedule
    tokens: list[int]
    """Of each prompt."""
    room_pages: int
    admits: Admits
    weights_pages: int = 0
    """Of the reference's weights, which are spilled behind the last score; 0: of no account."""
    rollouts: int = 1
    """Replicas of the rollout."""
    epoch: int = 0

    def __post_init__(self) -> None:
        self.drive = Driver(capacity_pages=self.room_pages, copies_pages=self.weights_pages)
        self.weights: dict[Participant, tuple[StorageId, HoldId]] = {}
        if self.weights_pages:
            self._make_weights()
        self.begin()

    def _make_weights(self) -> None:
        """Both readers hold them."""
        spec = StorageSpec(
            tensors=pages(self.weights_pages),
            readers=(ENCODER,),
            writers=(REFERENCE,),
            residency=Residency.SPILLABLE,
        )
        made = self.drive.answer(self.drive.open(REFERENCE, spec)).storage_id
        hold = self.drive.answer(self.drive.hold(REFERENCE, made, HoldKind.WRITE)).hold_id
        self.drive.publish(REFERENCE, hold)
        opened = self.drive.answer(self.drive.open(ENCODER)).storage_id
        for reader, storage in ((REFERENCE, made), (ENCODER, opened)):
            held = self.drive.answer(self.drive.hold(reader, storage, HoldKind.READ))
            self.weights[reader] = storage, held.hold_id

    def spill_weights(self, *_: object) -> None:
        """Their readers let go; what was read last is away some time later."""
        for reader, (storage, hold) in self.weights.items():
            self.drive.let_go(reader, hold)
            self.drive.park(reader, storage)
        self.weights.clear()

    def begin(self) -> None:
        """The next epoch. Whoever holds something of the one before lets go."""
        self.epoch += 1
        said = self.drive.begin(self.epoch)
        (room,) = [s.lease_room_bytes for s in said if isinstance(s, AnnounceStepBegan)]
        self.partners = Partners(
            dict.fromkeys(WORKERS, 1), dict.fromkeys(WORKERS, 1) | {Service.ROLLOUT: self.rollouts}
        )
        self.view = StepView(
            bound(plan(self.schedule, groups=len(self.tokens), epoch=self.epoch), self.partners),
            needs_reference=True,
            lease_room_bytes=room,
            partners=self.partners,
        )
        self.started: set[tuple[Task, int]] = set()
        self.running: dict[tuple[Task, int], Running] = {}
        self.leases: dict[tuple[str, int], LeaseId] = {}
        self.coming: deque[tuple[bodies.Body, int]] = deque()
        self.iterations = [0] * self.rollouts

    def run(
        self, choose: Callable[[list], tuple], disturb: Callable[[], None] = lambda: None
    ) -> None:
        """To its end, or until nothing can be done."""
        while True:
            disturb()
            moves = [("start", *key) for key in self.ready()]
            moves += [("finish", *key) for key in self.running if self.may_finish(key)]
            moves += [("deliver", None, None)] * bool(self.coming)
            if self.weights and self.view.reference_over:
                moves.append(("spill_weights", None, None))
            moves += [("end_move", None, None)] * bool(self.drive.moves)
            if not moves:
                return
            what, task, group = choose(moves)
            getattr(self, what)(task, group)

    def ready(self) -> list[tuple[Task, int]]:
        """What could be started now."""
        busy = any(task in COMPUTE for task, _ in self.running)
        return [
            (task, group)
            for task in TASKS
            for group in self.view.subjects(task)
            if (task, group) not in self.started
            and not (busy and task in COMPUTE)
            and self.view.may_start(task, group)
            and (task is not Task.DECODE or self._is_admitted_next(group))
            and (task not in COMPUTE or self.admits(self.view, self.started, (task, group)))
        ]

    def decoding(self, group: int) -> int:
        """Where a group does."""
        beside = self._beside(group)
        return sum(task is Task.DECODE and other in beside for task, other in self.running)

    def _beside(self, group: int) -> list[int]:
        """The living groups of its replica of the rollout."""
        replica = self._replica(group)
        return [one.group for one in self.view.living if self._replica(one.group) == replica]

    def _replica(self, group: int) -> int:
        return self.view.everyone[group].planned.rollout_replica

    def _is_admitted_next(self, group: int) -> bool:
        before = [other for other in self._beside(group) if other < group]
        in_order = all((Task.DECODE, other) in self.started for other in before)
        return in_order and self.decoding(group) < PLACES

    def start(self, task: Task, group: int) -> None:
        """Take what it reads, ask for what it makes."""
        self.started.add((task, group))
        if task is Task.DECODE and not self.view.window_opened:
            assert self.view.apply(event(bodies.WindowOpened(), epoch=self.epoch))
        running = Running()
        reader, name = self._reads(task)
        lease = self.leases.get((name, group))
        if lease is not None:
            self.drive.answer(self.drive.acquire(reader, lease, epoch=self.epoch))
            running.held = (reader, lease)
            if task is Task.DECODE:
                # The engine has a copy from its admission on.
                self.drive.release(*running.held)
                running.held = None
        if size := self._makes_bytes(task, group):
            running.maker, consumers = self._maker(task)
            running.request = self.drive.allocate(
                running.maker, *consumers, epoch=self.epoch, size_pages=_pages(size)
            )
        self.running[task, group] = running

    def may_finish(self, key: tuple[Task, int]) -> bool:
        """Whether it has the room that it asked for; the engine wants all its places taken."""
        if key[0] is Task.DECODE and self.decoding(key[1]) < PLACES:
            return all((Task.DECODE, other) in self.started for other in self._beside(key[1]))
        request = self.running[key].request
        return request is None or not self.drive.waits(request)

    def finish(self, task: Task, group: int) -> None:
        """Seal what it made, release what it read, tell of it."""
        running = self.running.pop((task, group))
        if running.request is not None:
            lease = self.drive.answer(running.request).lease_id
            self.drive.seal(running.maker, lease)
            self.leases[MAKES[task], group] = lease
        if running.held is not None:
            self.drive.release(*running.held)
        self.coming.extend((body, group) for body in self._told(task, group))

    def deliver(self, *_: object) -> None:
        """Events come back in order, some time after the task that sent them has ended."""
        body, group = self.coming.popleft()
        sender = Participant(service=Service.ROLLOUT, rank=self._replica(group))
        assert self.view.apply(replace(event(body, group, epoch=self.epoch), sender=sender))

    def end_move(self, *_: object) -> None:
        """The weights have left."""
        self.drive.end_move()

    def drop(self, group: int) -> None:
        """The group takes no further part: producers abandon its leases, readers let go."""
        dropped = bodies.GroupDropped(code="c", reason="r", sample=0)
        assert self.view.apply(event(dropped, group, epoch=self.epoch))
        for key in [key for key in self.running if key[1] == group]:
            self._give_up(self.running.pop(key))
        for name, owner in [key for key in self.leases if key[1] == group]:
            maker = LEARNER if name == "gradient" else ENCODER
            self.drive.abandon(maker, self.leases.pop((name, owner)))
        self.coming = deque(told for told in self.coming if told[1] != group)

    def kill(self, who: Participant) -> None:
        """A death ends the epoch; the next one begins."""
        self.drive.kill(who)
        self.drive.abort(self.epoch)
        for running in self.running.values():
            self._give_up(running, dead=who)
        assert self.drive.state.lease_states() == {}
        self.drive.join(who)
        self.begin()

    def _give_up(self, running: Running, dead: Participant | None = None) -> None:
        if running.held is not None and running.held[0] != dead:
            self.drive.release(*running.held)
        if running.request is None or running.maker == dead:
            return
        if self.drive.waits(running.request):
            self.drive.cancel(running.maker, running.request)
            return
        reply = self.drive.answers[running.request]
        if hasattr(reply, "lease_id"):
            self.drive.abandon(running.maker, reply.lease_id)

    def _reads(self, task: Task) -> tuple[Participant, str]:
        handed = {Schedule.FUSED: "policy", Schedule.DISAGGREGATED: ""}
        decode = (ROLLOUT, handed.get(self.schedule, "vision"))
        return decode if task is Task.DECODE else READS.get(task, (ROLLOUT, ""))

    def _maker(self, task: Task) -> tuple[Participant, tuple[Participant, ...]]:
        match MAKES[task]:
            case "vision":
                return ENCODER, (ROLLOUT,)
            case "policy":
                fused = self.schedule is Schedule.FUSED
                return ENCODER, (LEARNER, ROLLOUT) if fused else (LEARNER,)
            case "reference":
                return ENCODER, (REFERENCE,)
            case _:
                return LEARNER, (ENCODER,)

    def _makes_bytes(self, task: Task, group: int) -> int:
        prefix = self.tokens[group] - 1
        match MAKES.get(task):
            case "vision" if self.schedule not in (Schedule.FUSED, Schedule.DISAGGREGATED):
                return 100 * (self.tokens[group] // 2)
            case "policy" | "reference":
                return 300 * prefix
            case "gradient":
                return 500 * prefix
            case _:
                return 0

    def _told(self, task: Task, group: int) -> list[bodies.Body]:
        match task:
            case Task.PREPARE:
                return [
                    bodies.GroupPrepared(
                        prompt_lease=LeaseId(1),
                        prompt_tokens=self.tokens[group],
                        vision_tokens=self.tokens[group] // 2,
                        last_token=1,
                        start_position=0,
                    )
                ]
            case Task.POLICY_VISION:
                return [bodies.PolicyVisionEncoded(lease=None, weights_version=0)]
            case Task.POLICY_PREFIX | Task.REFERENCE_PREFIX:
                role = ModelRole(MAKES[task])
                return [bodies.PrefixEncoded(role=role, lease=LeaseId(2), weights_version=0)]
            case Task.DECODE:
                replica = self._replica(group)
                self.iterations[replica] += 1
                generated = bodies.GroupGenerated(
                    lease=LeaseId(3),
                    response_tokens=1,
                    decode_iteration=self.iterations[replica],
                    weights_version=0,
                )
                return [generated, bodies.GroupRewarded(rewards=(1.0,), failures=0)]
            case Task.REFERENCE_SCORE:
                return [bodies.GroupScored(lease=LeaseId(4))]
            case Task.RESPONSE_TRAIN:
                return [bodies.ResponsesTrained(lease=LeaseId(5))]
            case _:
                return [bodies.PrefixBackpropagated()]


@dataclass
class Running:
    """What a task waits for, and what it holds meanwhile."""

    request: int | None = None
    maker: Participant | None = None
    held: tuple[Participant, LeaseId] | None = None


def undropped(play: Play, wanted: set[int]) -> list[int]:
    """Groups that may still be dropped."""
    states = [play.view.groups.get(GroupId(group)) for group in sorted(wanted)]
    return [s.group for s in states if s is not None and s.alive and s.generated is None]
