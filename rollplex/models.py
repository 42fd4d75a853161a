"""What the client hands out: frozen values, no protobuf."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime, timedelta

    from common.step.plan import StepMode


class RunState(StrEnum):
    """The state of a run."""

    PENDING = "pending"
    """Waits for the run before it."""
    CONFIGURING = "configuring"
    """Services load the model, also after a death."""
    RUNNING = "running"
    """Steps are being made."""
    PAUSED = "paused"
    """Between two steps, until it is resumed or stopped."""
    SUCCEEDED = "succeeded"
    """Every step is committed."""
    FAILED = "failed"
    """Given up; `Run.reason` says why."""
    STOPPED = "stopped"
    """Ended by a client."""

    @property
    def ended(self) -> bool:
        """Whether nothing happens to the run any more."""
        return self in (RunState.SUCCEEDED, RunState.FAILED, RunState.STOPPED)

    @property
    def at_work(self) -> bool:
        """Whether services have the run; of one cluster's runs, one at a time."""
        return self in (RunState.CONFIGURING, RunState.RUNNING, RunState.PAUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run as the controller has it on disk.

    Attributes:
        reason: why it failed, stopped or waits; empty: nothing to say.
        recipe_json: the resolved recipe.
        run_dir: folder of the run, on the controller's machine.
        steps_done: the weights version reached.
        epoch: the newest attempt; grows with every step and every repetition.
        restarts: attempts that were begun again.
        ended: None: it has not.
        latest: metrics of the latest committed step.
        eval_reward_before: mean held-out reward before the first step; None: not evaluated.
        eval_reward_after: the same of the newest later evaluation.
        samples_dropped: samples that could not be used.
    """

    run_id: str
    state: RunState
    reason: str
    recipe_json: str
    run_dir: str
    steps_done: int
    steps_total: int
    epoch: int
    restarts: int
    created: datetime
    ended: datetime | None
    latest: Mapping[str, float] = field(default_factory=dict)
    eval_reward_before: float | None = None
    eval_reward_after: float | None = None
    pause_requested: bool = False
    samples_dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One committed step or evaluation.

    Attributes:
        weights_version: the version after it; for an evaluation, the one that was evaluated.
        wall: from the start of the attempt to the last event that the step needed.
    """

    step: int
    epoch: int
    mode: StepMode
    weights_version: int
    wall: timedelta
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePhase:
    """What one worker was doing at the last look.

    Attributes:
        group: the prompt that it is at; None: none, or the whole step.
        serving: whether it answered.
    """

    participant: str
    phase: str
    group: int | None
    serving: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunUpdate:
    """The latest state of a run.

    Attributes:
        step: a step that was committed since the update before; None: none was.
        note: one line for a person; empty: none.
    """

    run: Run
    step: StepRecord | None
    phases: tuple[ServicePhase, ...]
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint; `path` is on the learner's machine."""

    path: str
    weights_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceEntry:
    """One registered process."""

    participant: str
    node: str
    pid: int
    grpc_address: str
    http_address: str
    incarnation: str
    serving: bool
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Every registered process, by name."""

    services: tuple[ServiceEntry, ...]
