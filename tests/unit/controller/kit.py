"""Makes run machines, and messages for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.errors import ErrorCode
from common.events import Event, WorkSpan, bodies
from common.ids import (
    WORKERS,
    Epoch,
    GroupId,
    Incarnation,
    LeaseId,
    Participant,
    RunId,
    Service,
    StepIndex,
    WeightsVersion,
)
from common.step.place import Place
from common.step.schedule import Schedule
from services.controller import instructions as do
from services.controller import messages as got
from services.controller.config import FailurePolicy
from services.controller.phase import Phase
from services.controller.plans import RunSettings
from services.controller.record import RunRecord
from services.controller.state import RunMachine

if TYPE_CHECKING:
    from common.step.tasks import Task

RUN = RunId("run-1")
SECOND = 10**9
SETTINGS = RunSettings(
    steps=3,
    prompts_per_step=2,
    samples_per_group=4,
    schedule=Schedule.ROLLPLEX,
    eval_rows=0,
    eval_every_steps=0,
    checkpoint_every_steps=0,
    final_checkpoint=True,
    max_drop_fraction=0.5,
    needs_reference=True,
    step_deadline_s=60.0,
    replay_dir=None,
    ahead=True,
    place=Place(),
    order=lambda step: [2 * step, 2 * step + 1],
)
RECORD = RunRecord(run_id=RUN, steps_total=3, train_rows=10)
INCARNATIONS = {Participant(service=s): Incarnation(f"{s}-a") for s in WORKERS}


class Driver:
    """Feeds a machine and remembers what it wants done."""

    def __init__(
        self,
        *,
        record: RunRecord = RECORD,
        policy: FailurePolicy | None = None,
        history=None,
        **settings,
    ) -> None:
        self.machine = RunMachine(
            record, replace(SETTINGS, **settings), policy or FailurePolicy(), history
        )
        self.done: list[do.Instruction] = []
        self.epoch = record.epoch

    def tell(self, message: got.Message) -> list[do.Instruction]:
        instructions = self.machine.handle(message)
        self.machine.validate()
        self.done += instructions
        return instructions

    @property
    def phase(self) -> Phase:
        return self.machine.phase

    @property
    def record(self) -> RunRecord:
        return self.machine.record

    @property
    def ticket(self) -> int:
        return self.machine.ticket

    def last(self, kind):
        return next(i for i in reversed(self.done) if isinstance(i, kind))

    def all(self, kind):
        return [i for i in self.done if isinstance(i, kind)]

    def take_epoch(self) -> None:
        self.epoch += 1
        self.tell(got.EpochTaken(ticket=self.ticket, epoch=Epoch(self.epoch)))

    def to_configuring(self) -> None:
        if self.phase is Phase.PENDING:
            self.tell(got.Started())
        assert self.phase is Phase.GATHERING
        self.tell(got.ServicesReady(ticket=self.ticket))
        self.take_epoch()
        assert self.phase is Phase.CONFIGURING

    def configure(self, version: int = 0) -> None:
        self.to_configuring()
        self.tell(
            got.WorkersConfigured(
                ticket=self.ticket,
                weights_version=WeightsVersion(version),
                incarnations=INCARNATIONS,
            )
        )

    def begin(self) -> None:
        assert self.phase is Phase.PLANNING, self.phase
        self.take_epoch()
        assert self.phase is Phase.BEGINNING
        self.node(bodies.StepBegan(plan=self.last(do.BeginStep).plan))
        self.tell(got.StepBegun(ticket=self.ticket))
        assert self.phase is Phase.STEPPING

    def node(self, body, *, group=None, work=None, at_ns=0, epoch=None, step=None):
        return self.tell(
            got.NodeEvent(
                event=Event(
                    sender=Participant(service=Service.BROKER),
                    run_id=RUN,
                    step=StepIndex(self.record.steps_done if step is None else step),
                    epoch=Epoch(self.epoch if epoch is None else epoch),
                    body=body,
                    group=None if group is None else GroupId(group),
                    work=work,
                ),
                received_ns=at_ns,
            )
        )

    def publish(self) -> None:
        """The update is done: the step ends."""
        self.node(
            bodies.WeightsPublished(
                weights_version=WeightsVersion(self.record.steps_done + 1), metrics={"loss": 0.5}
            ),
            at_ns=5 * SECOND,
        )

    def commit(self) -> None:
        assert self.phase is Phase.COMMITTING, self.phase
        self.tell(got.StepCommitted(ticket=self.ticket))

    def train_step(self) -> None:
        self.begin()
        self.publish()
        self.commit()

    def evaluate(self, reward: float) -> None:
        self.begin()
        for group in range(len(self.last(do.BeginStep).plan.groups)):
            self.rollout(group, (reward,))
        self.commit()

    def rollout(self, group: int, rewards: tuple[float, ...]) -> None:
        self.node(
            bodies.GroupGenerated(
                lease=LeaseId(1),
                response_tokens=10,
                decode_iteration=1,
                weights_version=WeightsVersion(self.record.steps_done),
            ),
            group=group,
        )
        self.node(bodies.GroupRewarded(rewards=rewards, failures=0), group=group)

    def drop(self, group: int) -> None:
        self.node(
            bodies.GroupDropped(code="unreadable_image", reason="a.png: no file", sample=group),
            group=group,
        )

    def die(self, service: Service = Service.LEARNER, incarnation: str | None = None) -> None:
        participant = Participant(service=service)
        self.node(
            bodies.ParticipantDied(
                participant=participant,
                pid=1,
                incarnation=INCARNATIONS[participant] if incarnation is None else incarnation,
                reason="connection closed",
            )
        )

    def abandon(self) -> None:
        assert self.phase is Phase.ABORTING
        self.tell(got.StepAbandoned(ticket=self.ticket))

    def fail_work(self, *, code=ErrorCode.UNAVAILABLE, retryable=True) -> None:
        self.tell(
            got.WorkFailed(
                ticket=self.ticket, what="call", code=code, message="boom", retryable=retryable
            )
        )

    def close(self) -> None:
        assert self.phase is Phase.ENDING
        self.tell(got.RunClosed(ticket=self.ticket, now_unix_ms=77))


def span(task: Task, start: float, end: float) -> WorkSpan:
    return WorkSpan(task=task, start_ns=int(start * SECOND), end_ns=int(end * SECOND))
