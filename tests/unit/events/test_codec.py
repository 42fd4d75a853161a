"""Every kind of event survives its wire form."""

from __future__ import annotations

import typing

import pytest

from common.events import Event, UnknownEvent, WorkSpan, bodies, event_from_proto, event_to_proto
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
from common.step.plan import PlannedGroup, StepMode, StepPlan
from common.step.schedule import Schedule
from common.step.tasks import Task
from protos.rollplex.v1 import events_pb2

PLAN = StepPlan(
    run_id=RunId("r"),
    step=StepIndex(3),
    epoch=Epoch(9),
    mode=StepMode.EVAL,
    schedule=Schedule.FUSED,
    weights_version=WeightsVersion(3),
    groups=(PlannedGroup(group=GroupId(0), split="train", sample=17),),
    samples_per_group=4,
    greedy=True,
    replay_dir="/somewhere",
    ahead=(
        PlannedGroup(group=GroupId(0), split="eval", sample=3),
        PlannedGroup(group=GroupId(1), split="eval", sample=4, replica=1, rollout_replica=2),
    ),
)
LEARNER = Participant(service=Service.LEARNER, rank=2)
BODIES = [
    bodies.StepBegan(plan=PLAN),
    bodies.StepBegan(plan=PLAN, lease_room_bytes={"cpu": 1 << 40}),
    bodies.StepAborted(reason="why"),
    bodies.ParticipantJoined(participant=LEARNER, pid=5, incarnation="a"),
    bodies.ParticipantDied(participant=LEARNER, pid=5, incarnation="a", reason="eof"),
    bodies.GroupPrepared(
        prompt_lease=LeaseId(4), prompt_tokens=7, vision_tokens=4, last_token=3, start_position=-2
    ),
    bodies.GroupDropped(code="c", reason="r", sample=8),
    bodies.PolicyVisionEncoded(lease=None, weights_version=WeightsVersion(1)),
    bodies.PolicyVisionEncoded(lease=LeaseId(0), weights_version=WeightsVersion(1)),
    bodies.PrefixEncoded(
        role=bodies.ModelRole.REFERENCE, lease=LeaseId(1), weights_version=WeightsVersion(0)
    ),
    bodies.PrefixEncoded(
        role=bodies.ModelRole.POLICY,
        lease=LeaseId(1),
        weights_version=WeightsVersion(0),
        graph_bytes=0,
    ),
    bodies.WindowOpened(),
    bodies.WindowClosed(decode_iterations=3, response_tokens=12),
    bodies.GroupGenerated(
        lease=LeaseId(2), response_tokens=9, decode_iteration=2, weights_version=WeightsVersion(3)
    ),
    bodies.GroupRewarded(rewards=(0.0, 1.5), failures=1),
    bodies.GroupScored(lease=LeaseId(3)),
    bodies.ResponsesTrained(lease=None, metrics={"loss": 1.0}),
    bodies.ResponsesTrained(lease=LeaseId(6), metrics={}),
    bodies.PrefixBackpropagated(),
    bodies.PrefixBackpropagated(recomputed=True, recompute_s=0.25),
    bodies.WeightsPublished(weights_version=WeightsVersion(4), metrics={"norm": 0.5}),
    bodies.WeightsRefreshed(
        weights_version=WeightsVersion(4),
        alias_bytes=1,
        gather_bytes=2,
        rebuild_bytes=3,
        seconds=0.5,
    ),
    bodies.PushBegan(weights_version=WeightsVersion(4), elements=12),
    bodies.PushEnded(weights_version=WeightsVersion(4), size_bytes=48),
    bodies.AheadDone(task=Task.AHEAD_VISION, index=GroupId(1)),
    bodies.TaskFailed(task="update", code="internal", type="X", message="m", retryable=True),
    bodies.TaskCommanded(number=3, task=Task.REFERENCE_SCORE, group=GroupId(0)),
    bodies.TaskCommanded(number=4, task=Task.UPDATE, group=None),
    bodies.MemoryWanted(device="GPU-1", size_bytes=7),
    bodies.ContentsMoved(
        storage="reference.weights", device="GPU-1", restored=True, size_bytes=7, seconds=0.25
    ),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda b: type(b).__name__)
def test_round_trip(body):
    event = Event(
        sender=LEARNER,
        run_id=RunId("r"),
        step=StepIndex(3),
        epoch=Epoch(9),
        group=GroupId(0),
        work=WorkSpan(task=Task.DECODE, start_ns=1, end_ns=2, sms=66, decode_rate=0.75),
        cause_id="c",
        seq=11,
        body=body,
    )
    wire = event_to_proto(event).SerializeToString()
    assert event_from_proto(events_pb2.Event.FromString(wire)) == event


def test_every_kind_is_covered():
    kinds = set(typing.get_args(bodies.Body))
    assert {type(b) for b in BODIES} == kinds
    assert len(kinds) == len(events_pb2.Event.DESCRIPTOR.oneofs_by_name["body"].fields)


def test_absent_group_and_work_stay_absent():
    event = Event(
        sender=LEARNER,
        run_id=RunId("r"),
        step=StepIndex(0),
        epoch=Epoch(1),
        body=bodies.WindowOpened(),
    )
    assert event_from_proto(event_to_proto(event)) == event


def test_other_schema_version_is_refused():
    message = events_pb2.Event(event_id="e", schema_version=999, sender="learner/0")
    with pytest.raises(UnknownEvent, match="999"):
        event_from_proto(message)
