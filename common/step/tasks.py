"""The kinds of work of one training step, and which service does each."""

from __future__ import annotations

from enum import StrEnum

from common.ids import Service


class Task(StrEnum):
    """One kind of work; all but `DECODE` and `UPDATE` are done group by group."""

    PREPARE = "prepare"
    """Read a row, tokenize it, process its pixels."""
    POLICY_VISION = "policy_vision"
    """Vision tower of the policy."""
    POLICY_PREFIX = "policy_prefix"
    """Prefix forward of the policy; its graph is kept."""
    REFERENCE_PREFIX = "reference_prefix"
    """Vision tower (where not shared) and prefix forward of the reference."""
    DECODE = "decode"
    """Sampling of all responses of a group."""
    REWARD = "reward"
    """Reward functions on all responses of a group."""
    REFERENCE_SCORE = "reference_score"
    """Log-probabilities of the responses under the reference."""
    RESPONSE_TRAIN = "response_train"
    """Response forward, loss and backward; leaves the gradients of the prefix K/V."""
    PREFIX_BACKWARD = "prefix_backward"
    """Backward of the policy prefix (and vision tower) from the gradients of its K/V."""
    UPDATE = "update"
    """Normalise, clip, optimizer step, publish the next version."""
    AHEAD_PREPARE = "ahead_prepare"
    """`PREPARE` for a prompt of the next step."""
    AHEAD_VISION = "ahead_vision"
    """`POLICY_VISION` for a prompt of the next step; of a frozen tower only."""
    AHEAD_REFERENCE = "ahead_reference"
    """`REFERENCE_PREFIX` for a prompt of the next step."""


OWNER: dict[Task, Service] = {
    Task.PREPARE: Service.PREFIX_ENCODER,
    Task.POLICY_VISION: Service.PREFIX_ENCODER,
    Task.POLICY_PREFIX: Service.PREFIX_ENCODER,
    Task.REFERENCE_PREFIX: Service.PREFIX_ENCODER,
    Task.DECODE: Service.ROLLOUT,
    Task.REWARD: Service.ROLLOUT,
    Task.REFERENCE_SCORE: Service.REFERENCE,
    Task.RESPONSE_TRAIN: Service.LEARNER,
    Task.PREFIX_BACKWARD: Service.PREFIX_ENCODER,
    Task.UPDATE: Service.LEARNER,
    Task.AHEAD_PREPARE: Service.PREFIX_ENCODER,
    Task.AHEAD_VISION: Service.PREFIX_ENCODER,
    Task.AHEAD_REFERENCE: Service.PREFIX_ENCODER,
}

AHEAD: frozenset[Task] = frozenset({Task.AHEAD_PREPARE, Task.AHEAD_VISION, Task.AHEAD_REFERENCE})
"""Work for the next step's prompts. Its groups are those of `StepPlan.ahead`, its results stay in
the process that did it, and nothing waits for it."""

WEIGHTS_DEPENDENT: frozenset[Task] = frozenset(
    {
        Task.POLICY_VISION,
        Task.POLICY_PREFIX,
        Task.DECODE,
        Task.RESPONSE_TRAIN,
        Task.PREFIX_BACKWARD,
    }
)
"""Work that reads the policy's weights, so that it may never run ahead of an update."""
