"""What the run machine wants done. The actor runs these; each piece of work ends in one message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.ids import Epoch, RunId, StepIndex, WeightsVersion
    from common.step.plan import StepPlan
    from services.controller.record import RunRecord, RunState, SpanRecord, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRun:
    """Write the record. What comes after it in the list waits until it is on disk. No answer."""

    record: RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindRun:
    """Journal that the steps from `version` on are superseded. Ordered as SaveRun. No answer."""

    run_id: RunId
    epoch: Epoch
    version: WeightsVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmDeadline:
    """Replace the running timer. Ends in DeadlinePassed, unless another one is armed before."""

    ticket: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DisarmDeadline:
    """Stop the timer. No answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One line for a person, sent to watchers and to the log. No answer."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCheckpoint:
    """Tell waiting clients how their checkpoint went. No answer.

    Attributes:
        path: empty where there is an error.
        error: empty: the checkpoint is committed.
    """

    requests: tuple[int, ...]
    path: str
    weights_version: WeightsVersion
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherServices:
    """Wait until every service is registered and SERVING. Ends in ServicesReady.

    Attributes:
        delay_s: how long to wait before the first look, so that quick failures do not spin.
    """

    ticket: int
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeEpoch:
    """Take the run's next epoch. Ends in EpochTaken; waits as long as Redis is away."""

    ticket: int
    run_id: RunId


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigureWorkers:
    """Open the run at the broker, configure all workers. Ends in WorkersConfigured or WorkFailed.

    Attributes:
        previous_epoch: ended first, because workers may still be busy with it; 0: none.
    """

    ticket: int
    record: RunRecord
    epoch: Epoch
    previous_epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginStep:
    """Journal and begin the step. Ends in StepBegun or WorkFailed."""

    ticket: int
    plan: StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortStep:
    """Journal and end an epoch. Ends in StepAbandoned, whether the broker was there or not."""

    ticket: int
    run_id: RunId
    step: StepIndex
    epoch: Epoch
    reason: str
    broker_alive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitStep:
    """Journal a step and its files, with the run's record. Ends in StepCommitted.

    Never cancelled: whatever happens meanwhile is dealt with after it.
    """

    ticket: int
    record: RunRecord
    step: StepRecord
    spans: tuple[SpanRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptSteps:
    """Commit steps `first_step` to `version - 1` from the durable record. Ends in StepsAdopted."""

    ticket: int
    run_id: RunId
    epoch: Epoch
    first_step: StepIndex
    version: WeightsVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint:
    """Have the learner write a checkpoint. Ends in CheckpointSaved or WorkFailed."""

    ticket: int
    run_id: RunId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseRun:
    """End the epoch, release workers and broker, as far as they answer. Ends in RunClosed."""

    ticket: int
    run_id: RunId
    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOver:
    """The run has ended and is saved: the next one may start. No answer."""

    run_id: RunId
    outcome: RunState


Work = (
    GatherServices
    | TakeEpoch
    | ConfigureWorkers
    | BeginStep
    | AbortStep
    | CommitStep
    | AdoptSteps
    | SaveCheckpoint
    | CloseRun
)
"""Instructions that end in a message."""

Instruction = (
    Work | SaveRun | RewindRun | ArmDeadline | DisarmDeadline | Note | AnswerCheckpoint | RunOver
)
