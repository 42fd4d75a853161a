"""A run as it is kept: what the ledger stores and what clients are shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from common.ids import Epoch, RunId, StepIndex, WeightsVersion
from common.step.plan import StepMode

if TYPE_CHECKING:
    from collections.abc import Mapping


class RunState(StrEnum):
    """The state of a run, as clients see it."""

    PENDING = "pending"
    """Waits for the run before it; held in the controller's queue."""
    CONFIGURING = "configuring"
    """Services load the model, also after a death."""
    RUNNING = "running"
    """Steps, evaluations or checkpoints are being made."""
    PAUSED = "paused"
    """Between two steps, until it is resumed or stopped."""
    SUCCEEDED = "succeeded"
    """Every step is committed."""
    FAILED = "failed"
    """Given up; the reason says why."""
    STOPPED = "stopped"
    """Ended by a client."""

    @property
    def ended(self) -> bool:
        """Whether nothing happens to the run any more."""
        return self in (RunState.SUCCEEDED, RunState.FAILED, RunState.STOPPED)


class StopRequest(StrEnum):
    """What a client asked for."""

    NONE = "none"
    AFTER_STEP = "after_step"
    NOW = "now"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Everything about a run that outlives the controller's process.

    Attributes:
        steps_done: the weights version that is committed.
        first_version: the version that the run began with; None: not configured yet.
        checkpoint_version: the version of the newest checkpoint; None: none yet.
        epoch: the newest epoch taken; 0: none yet.
        restarts: epochs that were begun again.
        latest: metrics of the latest committed step.
        samples_dropped: dropped samples of the committed training steps.
        train_rows: length of the training set, found before the run was accepted.
        eval_rows: length of the held-out set; 0: none.
    """

    run_id: RunId
    state: RunState = RunState.PENDING
    reason: str = ""
    recipe_json: str = ""
    run_dir: str = ""
    resume_from: str | None = None
    steps_done: int = 0
    steps_total: int
    first_version: int | None = None
    checkpoint_version: int | None = None
    epoch: int = 0
    restarts: int = 0
    created_unix_ms: int = 0
    ended_unix_ms: int = 0
    latest: Mapping[str, float] = field(default_factory=dict)
    eval_reward_before: float | None = None
    eval_reward_after: float | None = None
    pause_requested: bool = False
    stop_requested: StopRequest = StopRequest.NONE
    samples_dropped: int = 0
    train_rows: int
    eval_rows: int = 0
    request_id: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> RunRecord:
        """Read what `to_json` wrote. Raises TypeError for unknown keys."""
        known = dict(tree)
        known["run_id"] = RunId(known["run_id"])
        known["state"] = RunState(known["state"])
        known["stop_requested"] = StopRequest(known["stop_requested"])
        return cls(**known)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One committed step or evaluation; also one line of `steps.jsonl`.

    Attributes:
        weights_version: the version after it (for an evaluation: the one that was evaluated).
        wall_s: from the start of the epoch to the last event that the step needed.
    """

    step: StepIndex
    epoch: Epoch
    mode: StepMode
    weights_version: WeightsVersion
    wall_s: float
    metrics: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> StepRecord:
        """Read what `to_json` wrote."""
        return cls(
            step=StepIndex(tree["step"]),
            epoch=Epoch(tree["epoch"]),
            mode=StepMode(tree["mode"]),
            weights_version=WeightsVersion(tree["weights_version"]),
            wall_s=float(tree["wall_s"]),
            metrics={name: float(value) for name, value in tree["metrics"].items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """One line of `timeline.jsonl`: when one piece of work ran, on the node's monotonic clock.

    Attributes:
        task: a `common.step.tasks.Task` value, "window" for the decode window, or "admit" for what
            the rollout does before it.
        sms: multiprocessors that it could fill; 0: all of the GPU, or there is none.
        group: None: about the whole step.
    """

    run: RunId
    step: StepIndex
    epoch: Epoch
    mode: StepMode
    group: int | None
    task: str
    participant: str
    start_ns: int
    end_ns: int
    sms: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What the journal of a run says.

    Attributes:
        evaluated: versions whose evaluation is committed, with the mean reward.
    """

    evaluated: Mapping[int, float] = field(default_factory=dict)
