"""The controller's values as messages of the public API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.step.plan import StepMode, mode_to_proto
from protos.rollplex.v1 import control_pb2 as pb
from services.controller.record import RunRecord, RunState, StepRecord

if TYPE_CHECKING:
    from common.registry.client import ServiceEntry
    from services.controller.fleet import PhaseSeen

_STATES: dict[RunState, pb.RunState.ValueType] = {
    RunState.PENDING: pb.RUN_STATE_PENDING,
    RunState.CONFIGURING: pb.RUN_STATE_CONFIGURING,
    RunState.RUNNING: pb.RUN_STATE_RUNNING,
    RunState.PAUSED: pb.RUN_STATE_PAUSED,
    RunState.SUCCEEDED: pb.RUN_STATE_SUCCEEDED,
    RunState.FAILED: pb.RUN_STATE_FAILED,
    RunState.STOPPED: pb.RUN_STATE_STOPPED,
}


def run_to_proto(record: RunRecord, *, waits_for: str = "") -> pb.Run:
    """A run as clients see it; `waits_for` is the reason of one that waits."""
    return pb.Run(
        run_id=record.run_id,
        state=_STATES[record.state],
        reason=record.reason or waits_for,
        recipe_json=record.recipe_json,
        run_dir=record.run_dir,
        steps_done=record.steps_done,
        steps_total=record.steps_total,
        epoch=record.epoch,
        restarts=record.restarts,
        created_unix_ms=record.created_unix_ms,
        ended_unix_ms=record.ended_unix_ms,
        latest=record.latest,
        eval_reward_before=record.eval_reward_before,
        eval_reward_after=record.eval_reward_after,
        pause_requested=record.pause_requested,
        samples_dropped=record.samples_dropped,
    )


def step_to_proto(step: StepRecord) -> pb.StepRecord:
    """A committed step or evaluation."""
    return pb.StepRecord(
        step=step.step,
        epoch=step.epoch,
        mode=mode_to_proto(StepMode(step.mode)),
        weights_version=step.weights_version,
        wall_s=step.wall_s,
        metrics=step.metrics,
    )


def phase_to_proto(seen: PhaseSeen) -> pb.ServicePhase:
    """What a worker was doing at the last look."""
    return pb.ServicePhase(
        participant=str(seen.participant),
        phase=seen.phase,
        group=seen.group,
        serving=seen.serving,
    )


def entry_to_proto(entry: ServiceEntry, phase: str) -> pb.ServiceEntry:
    """A registered process."""
    return pb.ServiceEntry(
        participant=str(entry.participant),
        node=entry.node,
        pid=entry.pid,
        grpc_address=entry.grpc_address,
        http_address=entry.http_address,
        incarnation=entry.incarnation,
        serving=entry.serving,
        phase=phase or entry.phase,
    )
