"""Messages of the public API to the client's values."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from common.errors import RollplexError
from common.step.plan import mode_from_proto
from protos.rollplex.v1 import control_pb2 as pb
from rollplex.models import (
    Cluster,
    Run,
    RunState,
    RunUpdate,
    ServiceEntry,
    ServicePhase,
    StepRecord,
)

_STATES: dict[int, RunState] = {
    pb.RUN_STATE_PENDING: RunState.PENDING,
    pb.RUN_STATE_CONFIGURING: RunState.CONFIGURING,
    pb.RUN_STATE_RUNNING: RunState.RUNNING,
    pb.RUN_STATE_PAUSED: RunState.PAUSED,
    pb.RUN_STATE_SUCCEEDED: RunState.SUCCEEDED,
    pb.RUN_STATE_FAILED: RunState.FAILED,
    pb.RUN_STATE_STOPPED: RunState.STOPPED,
}


class UnknownState(RollplexError):
    """The controller speaks of a state that this client does not know: it is newer."""


def run_from_proto(message: pb.Run) -> Run:
    """Raises UnknownState."""
    if message.state not in _STATES:
        raise UnknownState(
            f"run {message.run_id} is in state {message.state}, which this client does not know; "
            "use the client of the controller's version"
        )
    return Run(
        run_id=message.run_id,
        state=_STATES[message.state],
        reason=message.reason,
        recipe_json=message.recipe_json,
        run_dir=message.run_dir,
        steps_done=message.steps_done,
        steps_total=message.steps_total,
        epoch=message.epoch,
        restarts=message.restarts,
        created=_time(message.created_unix_ms),
        ended=_time(message.ended_unix_ms) if message.ended_unix_ms else None,
        latest=dict(message.latest),
        eval_reward_before=(
            message.eval_reward_before if message.HasField("eval_reward_before") else None
        ),
        eval_reward_after=(
            message.eval_reward_after if message.HasField("eval_reward_after") else None
        ),
        pause_requested=message.pause_requested,
        samples_dropped=message.samples_dropped,
    )


def step_from_proto(message: pb.StepRecord) -> StepRecord:
    """One committed step."""
    return StepRecord(
        step=message.step,
        epoch=message.epoch,
        mode=mode_from_proto(message.mode),
        weights_version=message.weights_version,
        wall=timedelta(seconds=message.wall_s),
        metrics=dict(message.metrics),
    )


def update_from_proto(message: pb.RunUpdate) -> RunUpdate:
    """One update of a watch."""
    return RunUpdate(
        run=run_from_proto(message.run),
        step=step_from_proto(message.step) if message.HasField("step") else None,
        phases=tuple(
            ServicePhase(
                participant=phase.participant,
                phase=phase.phase,
                group=phase.group if phase.HasField("group") else None,
                serving=phase.serving,
            )
            for phase in message.phases
        ),
        note=message.note,
    )


def cluster_from_proto(message: pb.Cluster) -> Cluster:
    """Every registered process, by name."""
    entries = [
        ServiceEntry(
            participant=entry.participant,
            node=entry.node,
            pid=entry.pid,
            grpc_address=entry.grpc_address,
            http_address=entry.http_address,
            incarnation=entry.incarnation,
            serving=entry.serving,
            phase=entry.phase,
        )
        for entry in message.services
    ]
    return Cluster(services=tuple(sorted(entries, key=lambda entry: entry.participant)))


def _time(unix_ms: int) -> datetime:
    return datetime.fromtimestamp(unix_ms / 1000, tz=UTC)
