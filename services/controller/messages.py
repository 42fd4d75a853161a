"""What the run machine is told. Every piece of work that it orders comes back as one of these.

A message that answers an instruction carries the instruction's ticket. The machine takes a new
ticket with every transition, so an answer that arrives too late has an old one and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.errors import ErrorCode
    from common.events import Event
    from common.ids import Epoch, Incarnation, Participant, WeightsVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The run's turn has come, or the controller took it up again after its own restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRequested:
    """A client wants the run to wait after the running step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequested:
    """A client wants a paused run to go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """A client ends the run: now, or when the running step is committed."""

    after_step: bool
    now_unix_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequested:
    """A client wants a checkpoint of the next committed state."""

    request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicesReady:
    """Every service is registered and SERVING."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicesMissing:
    """Progress of the wait for services; not an end of it.

    Attributes:
        waiting_for: one text for each service that is not SERVING, empty while Redis is away.
        registry_away: whether Redis did not answer, so that nothing is known.
    """

    ticket: int
    waiting_for: tuple[str, ...] = ()
    registry_away: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochTaken:
    """The next epoch is ours, on disk."""

    ticket: int
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersConfigured:
    """Every worker answered that it can take part.

    Attributes:
        weights_version: the durable version that the learner holds.
        incarnations: of every worker, by participant.
        facts: what the workers said about themselves.
    """

    ticket: int
    weights_version: WeightsVersion
    incarnations: Mapping[Participant, Incarnation] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegun:
    """The broker has published StepBegan."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    """One event of the node's order.

    Attributes:
        received_ns: monotonic clock of the node when the controller saw it.
    """

    event: Event
    received_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerLost:
    """The broker's event stream ended, or the hub is a new incarnation: events may be missing."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted:
    """The record is on disk."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsAdopted:
    """Steps that were durable but not committed are committed now.

    Attributes:
        metrics: those of the durable record, for the newest of the steps.
    """

    ticket: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """The learner committed a checkpoint."""

    ticket: int
    path: str
    weights_version: WeightsVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAbandoned:
    """The abort reached the broker, or could not."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClosed:
    """Workers and broker gave the run up as far as they could be reached."""

    ticket: int
    now_unix_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFailed:
    """An instruction ended in an error.

    Attributes:
        what: the instruction and its peer, in words.
    """

    ticket: int
    what: str
    code: ErrorCode
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed:
    """The time for the phase is over."""

    ticket: int


Command = PauseRequested | ResumeRequested | StopRequested | CheckpointRequested
"""What clients ask for."""

Message = (
    Started
    | Command
    | ServicesReady
    | ServicesMissing
    | EpochTaken
    | WorkersConfigured
    | StepBegun
    | NodeEvent
    | BrokerLost
    | StepCommitted
    | StepsAdopted
    | CheckpointSaved
    | StepAbandoned
    | RunClosed
    | WorkFailed
    | DeadlinePassed
)
