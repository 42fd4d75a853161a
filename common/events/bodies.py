"""What can happen in a step, one class per kind of event."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.ids import GroupId, LeaseId, Participant, WeightsVersion
    from common.step.plan import StepPlan
    from common.step.tasks import Task


class ModelRole(StrEnum):
    """Whose forward it was."""

    POLICY = "policy"
    REFERENCE = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegan:
    """First event of an epoch."""

    plan: StepPlan
    lease_room_bytes: Mapping[str, int] = field(default_factory=dict)
    """By arena, ``cpu`` or a GPU's UUID: what the step's leases may come to together. Replicas have
    equal shares of the host's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAborted:
    """Nothing of this epoch is accepted any more."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantJoined:
    """A participant opened its data-plane connection to the broker."""

    participant: Participant
    pid: int
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantDied:
    """A participant lost its data-plane connection."""

    participant: Participant
    pid: int
    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPrepared:
    """The prompt tensors of a group are sealed."""

    prompt_lease: LeaseId
    prompt_tokens: int
    vision_tokens: int
    last_token: int
    start_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDropped:
    """The group takes no further part: a bad sample, or the reward policy said so."""

    code: str
    reason: str
    sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVisionEncoded:
    """The policy's vision embeddings exist; no lease where nobody outside needs them."""

    lease: LeaseId | None
    weights_version: WeightsVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixEncoded:
    """Prefix K/V of one role, of all prompt tokens but the last."""

    role: ModelRole
    lease: LeaseId
    weights_version: WeightsVersion
    graph_bytes: int | None = None
    """Device memory of the policy's graph, which stays in the process; 0: not measured; None: no
    graph stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOpened:
    """The first sequence of the step decodes.

    Its work is what came before: from the first group's admission to the opening.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowClosed:
    """The last sequence of the step has ended."""

    decode_iterations: int
    response_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGenerated:
    """All responses of a group are sampled; no lease where nobody reads them."""

    lease: LeaseId | None
    response_tokens: int
    decode_iteration: int
    weights_version: WeightsVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewarded:
    """One reward per response; `failures` of them come from the error policy."""

    rewards: tuple[float, ...]
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScored:
    """Reference log-probabilities of the responses."""

    lease: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesTrained:
    """The response part is accumulated; no lease where the K/V gradients are all zero."""

    lease: LeaseId | None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixBackpropagated:
    """The prefix part is accumulated: the group is done."""

    recomputed: bool = False
    """Whether no graph had stayed, so that the prefix ran forward again."""
    recompute_s: float = 0.0
    """Time of that forward, a part of the event's work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPublished:
    """The update is done and durable."""

    weights_version: WeightsVersion
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRefreshed:
    """A rank of the rollout, or its engine, has the step's weights: where training has another
    degree, or the engine has processes of its own."""

    weights_version: WeightsVersion
    alias_bytes: int
    """Read where training wrote them."""
    gather_bytes: int
    """Copied into memory shared with training."""
    rebuild_bytes: int
    """Copied into memory of the rank's own, or of its engine's."""
    seconds: float
    """Of the copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushBegan:
    """A rank of the learner sends the weights of a version to the same rank of the rollout."""

    weights_version: WeightsVersion
    elements: int
    """So many of the flat weights follow on the link of the two; the others stay as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushEnded:
    """The rollout's weights are readable as that version."""

    weights_version: WeightsVersion
    size_bytes: int
    """That were received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadDone:
    """A result for a prompt of the next step lies in the sender's process.

    Its work is None where it lay there already. The event is about no group of the present step.
    """

    task: Task
    index: GroupId
    """Which group of `StepPlan.ahead`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFailed:
    """A task ended in an error; the epoch ends with it."""

    task: str
    code: str
    type: str
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCommanded:
    """The first rank of a replica has begun a task that the others there have to do too."""

    number: int
    """1, 2, ... in this epoch, service and replica: the order in which every rank begins them."""
    task: Task
    group: GroupId | None
    """None: the task is about the whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWanted:
    """A storage is to come back to a device that has no room for it now."""

    device: str
    """``cpu``, or a GPU's UUID."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentsMoved:
    """The contents of a storage have left its device, or have come back."""

    storage: str
    """Its name, such as ``reference.weights``."""
    device: str
    """``cpu``, or a GPU's UUID."""
    restored: bool
    """Whether they have come back."""
    size_bytes: int
    """Of the device, given back or taken."""
    seconds: float
    """Of the move itself, without what it waited for."""


Body = (
    StepBegan
    | StepAborted
    | ParticipantJoined
    | ParticipantDied
    | GroupPrepared
    | GroupDropped
    | PolicyVisionEncoded
    | PrefixEncoded
    | WindowOpened
    | WindowClosed
    | GroupGenerated
    | GroupRewarded
    | GroupScored
    | ResponsesTrained
    | PrefixBackpropagated
    | WeightsPublished
    | WeightsRefreshed
    | PushBegan
    | PushEnded
    | AheadDone
    | TaskFailed
    | TaskCommanded
    | MemoryWanted
    | ContentsMoved
)

FOR_ALL_RANKS: frozenset[type] = frozenset(
    {
        StepBegan,
        StepAborted,
        GroupPrepared,
        GroupDropped,
        GroupRewarded,
        WeightsPublished,
        WeightsRefreshed,
        TaskFailed,
        TaskCommanded,
    }
)
"""What every rank takes in, whoever says it; the rest is for those who read the sender's rank."""
