"""Events for the bus tests."""

from __future__ import annotations

from common.events import Event
from common.events.bodies import PrefixBackpropagated, StepBegan
from common.ids import Epoch, GroupId, Participant, RunId, Service, StepIndex, WeightsVersion
from common.step.plan import StepMode, StepPlan
from common.step.schedule import Schedule

LEARNER = Participant(service=Service.LEARNER)
ROLLOUT = Participant(service=Service.ROLLOUT)
BROKER = Participant(service=Service.BROKER)
RUN = RunId("r1")


def group_event(group: int, *, epoch: int = 1, sender: Participant = LEARNER) -> Event:
    return Event(
        sender=sender,
        run_id=RUN,
        step=StepIndex(0),
        epoch=Epoch(epoch),
        group=GroupId(group),
        body=PrefixBackpropagated(),
        event_id=f"{sender}-{epoch}-{group}",
    )


def step_began(epoch: int) -> Event:
    plan = StepPlan(
        run_id=RUN,
        step=StepIndex(epoch),
        epoch=Epoch(epoch),
        mode=StepMode.TRAIN,
        schedule=next(iter(Schedule)),
        weights_version=WeightsVersion(0),
        groups=(),
        samples_per_group=1,
    )
    return Event(
        sender=BROKER,
        run_id=RUN,
        step=StepIndex(epoch),
        epoch=Epoch(epoch),
        body=StepBegan(plan=plan),
        event_id=f"step-{epoch}",
    )
