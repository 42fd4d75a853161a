"""Events to and from their wire form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.errors import InvalidArgument
from common.events import bodies
from common.events.bodies import Body, ModelRole
from common.events.event import SCHEMA_VERSION, Event, WorkSpan
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
from common.step.plan import StepPlan
from common.step.tasks import Task
from protos.rollplex.v1 import common_pb2, events_pb2


class UnknownEvent(InvalidArgument):
    """An event of another schema version, or of a kind that this version does not know."""


def event_to_proto(event: Event) -> events_pb2.Event:
    """The wire form of an event."""
    message = events_pb2.Event(
        event_id=event.event_id,
        cause_id=event.cause_id,
        sender=str(event.sender),
        seq=event.seq,
        schema_version=event.schema_version,
        run_id=event.run_id,
        step=event.step,
        epoch=event.epoch,
        group=event.group,
    )
    if event.work is not None:
        message.work.CopyFrom(
            events_pb2.WorkSpan(
                task=event.work.task,
                start_ns=event.work.start_ns,
                end_ns=event.work.end_ns,
                sms=event.work.sms,
                decode_rate=event.work.decode_rate,
            )
        )
    name, encode, _ = _CODECS[type(event.body)]
    getattr(message, name).CopyFrom(encode(event.body))
    return message


def event_from_proto(message: events_pb2.Event) -> Event:
    """Read the wire form. Raises UnknownEvent."""
    kind = message.WhichOneof("body")
    if message.schema_version != SCHEMA_VERSION or kind is None:
        raise UnknownEvent(
            f"event {message.event_id} from {message.sender} has schema version "
            f"{message.schema_version} and kind {kind}; this process reads version "
            f"{SCHEMA_VERSION}",
            event_id=message.event_id,
        )
    work = None
    if message.HasField("work"):
        work = WorkSpan(
            task=Task(message.work.task),
            start_ns=message.work.start_ns,
            end_ns=message.work.end_ns,
            sms=message.work.sms,
            decode_rate=message.work.decode_rate,
        )
    return Event(
        event_id=message.event_id,
        cause_id=message.cause_id,
        sender=Participant.parse(message.sender),
        seq=message.seq,
        schema_version=message.schema_version,
        run_id=RunId(message.run_id),
        step=StepIndex(message.step),
        epoch=Epoch(message.epoch),
        group=GroupId(message.group) if message.HasField("group") else None,
        work=work,
        body=_DECODERS[kind](getattr(message, kind)),
    )


def _participant(message: common_pb2.Participant) -> Participant:
    return Participant(service=Service(message.service), rank=message.rank)


def _participant_proto(value: Participant) -> common_pb2.Participant:
    return common_pb2.Participant(service=value.service, rank=value.rank)


def _optional_lease(message: Any) -> LeaseId | None:
    return LeaseId(message.lease) if message.HasField("lease") else None


def _joined(message: events_pb2.ParticipantJoined) -> bodies.ParticipantJoined:
    return bodies.ParticipantJoined(
        participant=_participant(message.participant),
        pid=message.pid,
        incarnation=message.incarnation,
    )


def _joined_proto(body: bodies.ParticipantJoined) -> events_pb2.ParticipantJoined:
    return events_pb2.ParticipantJoined(
        participant=_participant_proto(body.participant), pid=body.pid, incarnation=body.incarnation
    )


def _died(message: events_pb2.ParticipantDied) -> bodies.ParticipantDied:
    return bodies.ParticipantDied(
        participant=_participant(message.participant),
        pid=message.pid,
        incarnation=message.incarnation,
        reason=message.reason,
    )


def _died_proto(body: bodies.ParticipantDied) -> events_pb2.ParticipantDied:
    return events_pb2.ParticipantDied(
        participant=_participant_proto(body.participant),
        pid=body.pid,
        incarnation=body.incarnation,
        reason=body.reason,
    )


def _failed_proto(body: bodies.TaskFailed) -> events_pb2.TaskFailed:
    error = common_pb2.ErrorDetail(
        code=body.code, type=body.type, message=body.message, retryable=body.retryable
    )
    return events_pb2.TaskFailed(task=body.task, error=error)


def _failed(message: events_pb2.TaskFailed) -> bodies.TaskFailed:
    return bodies.TaskFailed(
        task=message.task,
        code=message.error.code,
        type=message.error.type,
        message=message.error.message,
        retryable=message.error.retryable,
    )


_Codec = tuple[str, Callable[[Any], Any], Callable[[Any], Body]]

_CODECS: dict[type[Any], _Codec] = {
    bodies.StepBegan: (
        "step_began",
        lambda b: events_pb2.StepBegan(plan=b.plan.to_proto(), lease_room_bytes=b.lease_room_bytes),
        lambda m: bodies.StepBegan(
            plan=StepPlan.from_proto(m.plan), lease_room_bytes=dict(m.lease_room_bytes)
        ),
    ),
    bodies.StepAborted: (
        "step_aborted",
        lambda b: events_pb2.StepAborted(reason=b.reason),
        lambda m: bodies.StepAborted(reason=m.reason),
    ),
    bodies.ParticipantJoined: ("participant_joined", _joined_proto, _joined),
    bodies.ParticipantDied: ("participant_died", _died_proto, _died),
    bodies.GroupPrepared: (
        "group_prepared",
        lambda b: events_pb2.GroupPrepared(
            prompt_lease=b.prompt_lease,
            prompt_tokens=b.prompt_tokens,
            vision_tokens=b.vision_tokens,
            last_token=b.last_token,
            start_position=b.start_position,
        ),
        lambda m: bodies.GroupPrepared(
            prompt_lease=LeaseId(m.prompt_lease),
            prompt_tokens=m.prompt_tokens,
            vision_tokens=m.vision_tokens,
            last_token=m.last_token,
            start_position=m.start_position,
        ),
    ),
    bodies.GroupDropped: (
        "group_dropped",
        lambda b: events_pb2.GroupDropped(code=b.code, reason=b.reason, sample=b.sample),
        lambda m: bodies.GroupDropped(code=m.code, reason=m.reason, sample=m.sample),
    ),
    bodies.PolicyVisionEncoded: (
        "policy_vision_encoded",
        lambda b: events_pb2.PolicyVisionEncoded(lease=b.lease, weights_version=b.weights_version),
        lambda m: bodies.PolicyVisionEncoded(
            lease=_optional_lease(m), weights_version=WeightsVersion(m.weights_version)
        ),
    ),
    bodies.PrefixEncoded: (
        "prefix_encoded",
        lambda b: events_pb2.PrefixEncoded(
            role=b.role,
            lease=b.lease,
            weights_version=b.weights_version,
            graph_bytes=b.graph_bytes,
        ),
        lambda m: bodies.PrefixEncoded(
            role=ModelRole(m.role),
            lease=LeaseId(m.lease),
            weights_version=WeightsVersion(m.weights_version),
            graph_bytes=m.graph_bytes if m.HasField("graph_bytes") else None,
        ),
    ),
    bodies.WindowOpened: (
        "window_opened",
        lambda _: events_pb2.WindowOpened(),
        lambda _: bodies.WindowOpened(),
    ),
    bodies.WindowClosed: (
        "window_closed",
        lambda b: events_pb2.WindowClosed(
            decode_iterations=b.decode_iterations, response_tokens=b.response_tokens
        ),
        lambda m: bodies.WindowClosed(
            decode_iterations=m.decode_iterations, response_tokens=m.response_tokens
        ),
    ),
    bodies.GroupGenerated: (
        "group_generated",
        lambda b: events_pb2.GroupGenerated(
            lease=b.lease,
            response_tokens=b.response_tokens,
            decode_iteration=b.decode_iteration,
            weights_version=b.weights_version,
        ),
        lambda m: bodies.GroupGenerated(
            lease=_optional_lease(m),
            response_tokens=m.response_tokens,
            decode_iteration=m.decode_iteration,
            weights_version=WeightsVersion(m.weights_version),
        ),
    ),
    bodies.GroupRewarded: (
        "group_rewarded",
        lambda b: events_pb2.GroupRewarded(rewards=b.rewards, failures=b.failures),
        lambda m: bodies.GroupRewarded(rewards=tuple(m.rewards), failures=m.failures),
    ),
    bodies.GroupScored: (
        "group_scored",
        lambda b: events_pb2.GroupScored(lease=b.lease),
        lambda m: bodies.GroupScored(lease=LeaseId(m.lease)),
    ),
    bodies.ResponsesTrained: (
        "responses_trained",
        lambda b: events_pb2.ResponsesTrained(lease=b.lease, metrics=b.metrics),
        lambda m: bodies.ResponsesTrained(lease=_optional_lease(m), metrics=dict(m.metrics)),
    ),
    bodies.PrefixBackpropagated: (
        "prefix_backpropagated",
        lambda b: events_pb2.PrefixBackpropagated(
            recomputed=b.recomputed, recompute_s=b.recompute_s
        ),
        lambda m: bodies.PrefixBackpropagated(recomputed=m.recomputed, recompute_s=m.recompute_s),
    ),
    bodies.WeightsPublished: (
        "weights_published",
        lambda b: events_pb2.WeightsPublished(weights_version=b.weights_version, metrics=b.metrics),
        lambda m: bodies.WeightsPublished(
            weights_version=WeightsVersion(m.weights_version), metrics=dict(m.metrics)
        ),
    ),
    bodies.WeightsRefreshed: (
        "weights_refreshed",
        lambda b: events_pb2.WeightsRefreshed(
            weights_version=b.weights_version,
            alias_bytes=b.alias_bytes,
            gather_bytes=b.gather_bytes,
            rebuild_bytes=b.rebuild_bytes,
            seconds=b.seconds,
        ),
        lambda m: bodies.WeightsRefreshed(
            weights_version=WeightsVersion(m.weights_version),
            alias_bytes=m.alias_bytes,
            gather_bytes=m.gather_bytes,
            rebuild_bytes=m.rebuild_bytes,
            seconds=m.seconds,
        ),
    ),
    bodies.PushBegan: (
        "push_began",
        lambda b: events_pb2.PushBegan(weights_version=b.weights_version, elements=b.elements),
        lambda m: bodies.PushBegan(
            weights_version=WeightsVersion(m.weights_version), elements=m.elements
        ),
    ),
    bodies.PushEnded: (
        "push_ended",
        lambda b: events_pb2.PushEnded(weights_version=b.weights_version, size_bytes=b.size_bytes),
        lambda m: bodies.PushEnded(
            weights_version=WeightsVersion(m.weights_version), size_bytes=m.size_bytes
        ),
    ),
    bodies.AheadDone: (
        "ahead_done",
        lambda b: events_pb2.AheadDone(task=b.task, index=b.index),
        lambda m: bodies.AheadDone(task=Task(m.task), index=GroupId(m.index)),
    ),
    bodies.TaskFailed: ("task_failed", _failed_proto, _failed),
    bodies.TaskCommanded: (
        "task_commanded",
        lambda b: events_pb2.TaskCommanded(number=b.number, task=b.task, group=b.group),
        lambda m: bodies.TaskCommanded(
            number=m.number,
            task=Task(m.task),
            group=GroupId(m.group) if m.HasField("group") else None,
        ),
    ),
    bodies.MemoryWanted: (
        "memory_wanted",
        lambda b: events_pb2.MemoryWanted(device=b.device, size_bytes=b.size_bytes),
        lambda m: bodies.MemoryWanted(device=m.device, size_bytes=m.size_bytes),
    ),
    bodies.ContentsMoved: (
        "contents_moved",
        lambda b: events_pb2.ContentsMoved(
            storage=b.storage,
            device=b.device,
            restored=b.restored,
            size_bytes=b.size_bytes,
            seconds=b.seconds,
        ),
        lambda m: bodies.ContentsMoved(
            storage=m.storage,
            device=m.device,
            restored=m.restored,
            size_bytes=m.size_bytes,
            seconds=m.seconds,
        ),
    ),
}

_DECODERS: dict[str, Callable[[Any], Body]] = {name: decode for name, _, decode in _CODECS.values()}
