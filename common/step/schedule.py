"""When a task may start: one pure table that every service and the simulator ask.

A schedule is nothing but this table. All schedules run the same tasks with the same kernels and
make the same update; they differ in the conditions under which a task may begin.
"""

from __future__ import annotations

from enum import StrEnum

from common.step.tasks import Task


class Schedule(StrEnum):
    """The named schedules."""

    SERIAL = "serial"
    """Rollout, then reference, then training, then update."""
    DISAGGREGATED = "disaggregated"
    """The same phases on two sets of processes: the rollout has weights and a vision tower of its
    own, to which each update is pushed; finished groups are scored while others decode."""
    ROLLPLEX = "rollplex"
    """Policy and reference prefixes inside the decode window."""
    FUSED = "fused"
    """One prefill for rollout and training; finished groups train while others decode."""


class Condition(StrEnum):
    """A fact about the step, or about one group of it, that a task waits for."""

    PREPARED = "prepared"
    """The group's prompt tensors are sealed."""
    VISION_ENCODED = "vision_encoded"
    """The policy's vision embeddings of the group exist."""
    POLICY_PREFIX_ENCODED = "policy_prefix_encoded"
    """The policy's prefix K/V of the group exist."""
    REFERENCE_PREFIX_ENCODED = "reference_prefix_encoded"
    """The reference's prefix K/V of the group exist."""
    GENERATED = "generated"
    """All responses of the group are sampled."""
    REWARDED = "rewarded"
    """All responses of the group have a reward."""
    SCORED = "scored"
    """The responses' reference log-probabilities exist, or the algorithm needs none."""
    RESPONSES_TRAINED = "responses_trained"
    """The response part of the group is in the gradient accumulator."""
    WINDOW_OPENED = "window_opened"
    """A sequence of this step has begun to decode where the replica's groups do, or none will."""
    ROLLOUT_OVER = "rollout_over"
    """Every group of the replicas of the rollout that decode this one's is generated and rewarded,
    or dropped."""
    REFERENCE_OVER = "reference_over"
    """Every living group is scored."""
    GROUPS_DONE = "groups_done"
    """Every living group of every replica is wholly in its gradient accumulator."""
    PREVIOUS_DONE = "previous_done"
    """Every group before this one in the accumulation order is wholly accumulated."""
    WINDOW_OPEN = "window_open"
    """Sequences of this step decode at the moment, where the replica's groups do."""
    GROUPS_PREPARED = "groups_prepared"
    """Every living group's prompt tensors are sealed."""
    REFERENCE_PREFIXES_ENCODED = "reference_prefixes_encoded"
    """Every living group has the reference's prefix K/V, or the step needs none."""
    AHEAD_PREPARED = "ahead_prepared"
    """The prompt tensors of this group of the next step are there."""
    NEVER = "never"
    """The schedule has no such work."""


class AccumulationOrder(StrEnum):
    """The order in which groups are added to the gradient accumulator: a function of content."""

    GROUP = "group"
    """By group index."""
    COMPLETION = "completion"
    """By the engine iteration of the group's last token, then by group index."""


_COMMON: dict[Task, frozenset[Condition]] = {
    Task.PREPARE: frozenset(),
    Task.REWARD: frozenset({Condition.GENERATED}),
    Task.PREFIX_BACKWARD: frozenset({Condition.RESPONSES_TRAINED}),
    Task.UPDATE: frozenset({Condition.ROLLOUT_OVER, Condition.GROUPS_DONE}),
    # Behind the start of a step, where launching kernels wants the processor.
    Task.AHEAD_PREPARE: frozenset({Condition.GROUPS_PREPARED, Condition.WINDOW_OPENED}),
}

_AHEAD_IN_WINDOW = frozenset(
    {Condition.WINDOW_OPEN, Condition.REFERENCE_PREFIXES_ENCODED, Condition.AHEAD_PREPARED}
)

_TRAINING_LAST: dict[Task, frozenset[Condition]] = {
    Task.POLICY_PREFIX: frozenset(
        {
            Condition.VISION_ENCODED,
            Condition.ROLLOUT_OVER,
            Condition.REFERENCE_OVER,
            Condition.PREVIOUS_DONE,
        }
    ),
    Task.RESPONSE_TRAIN: frozenset(
        {
            Condition.POLICY_PREFIX_ENCODED,
            Condition.REWARDED,
            Condition.SCORED,
            Condition.ROLLOUT_OVER,
            Condition.REFERENCE_OVER,
            Condition.PREVIOUS_DONE,
        }
    ),
}
"""Nothing of the policy is trained before rollout and reference are over."""

TABLE: dict[Schedule, dict[Task, frozenset[Condition]]] = {
    Schedule.SERIAL: {
        **_COMMON,
        Task.AHEAD_VISION: frozenset({Condition.NEVER}),
        Task.AHEAD_REFERENCE: frozenset({Condition.NEVER}),
        Task.POLICY_VISION: frozenset({Condition.PREPARED}),
        Task.DECODE: frozenset({Condition.VISION_ENCODED}),
        Task.REFERENCE_PREFIX: frozenset({Condition.VISION_ENCODED, Condition.ROLLOUT_OVER}),
        Task.REFERENCE_SCORE: frozenset(
            {Condition.GENERATED, Condition.REFERENCE_PREFIX_ENCODED, Condition.ROLLOUT_OVER}
        ),
        **_TRAINING_LAST,
    },
    Schedule.DISAGGREGATED: {
        **_COMMON,
        Task.AHEAD_VISION: frozenset({Condition.NEVER}),
        Task.AHEAD_REFERENCE: frozenset({Condition.NEVER}),
        Task.DECODE: frozenset({Condition.PREPARED}),
        Task.POLICY_VISION: frozenset({Condition.GENERATED}),
        Task.REFERENCE_PREFIX: frozenset({Condition.VISION_ENCODED, Condition.GENERATED}),
        Task.REFERENCE_SCORE: frozenset({Condition.GENERATED, Condition.REFERENCE_PREFIX_ENCODED}),
        **_TRAINING_LAST,
    },
    Schedule.ROLLPLEX: {
        **_COMMON,
        Task.AHEAD_VISION: _AHEAD_IN_WINDOW,
        Task.AHEAD_REFERENCE: _AHEAD_IN_WINDOW,
        Task.POLICY_VISION: frozenset({Condition.PREPARED}),
        Task.DECODE: frozenset({Condition.VISION_ENCODED}),
        Task.REFERENCE_PREFIX: frozenset({Condition.VISION_ENCODED, Condition.WINDOW_OPENED}),
        Task.REFERENCE_SCORE: frozenset(
            {Condition.GENERATED, Condition.REFERENCE_PREFIX_ENCODED, Condition.ROLLOUT_OVER}
        ),
        Task.POLICY_PREFIX: frozenset({Condition.VISION_ENCODED, Condition.WINDOW_OPENED}),
        Task.RESPONSE_TRAIN: _TRAINING_LAST[Task.RESPONSE_TRAIN],
    },
    Schedule.FUSED: {
        **_COMMON,
        Task.AHEAD_VISION: _AHEAD_IN_WINDOW,
        Task.AHEAD_REFERENCE: _AHEAD_IN_WINDOW,
        Task.POLICY_VISION: frozenset({Condition.PREPARED}),
        Task.POLICY_PREFIX: frozenset({Condition.VISION_ENCODED}),
        Task.DECODE: frozenset({Condition.POLICY_PREFIX_ENCODED}),
        Task.REFERENCE_PREFIX: frozenset({Condition.VISION_ENCODED, Condition.WINDOW_OPENED}),
        Task.REFERENCE_SCORE: frozenset({Condition.GENERATED, Condition.REFERENCE_PREFIX_ENCODED}),
        Task.RESPONSE_TRAIN: frozenset(
            {
                Condition.POLICY_PREFIX_ENCODED,
                Condition.GENERATED,
                Condition.REWARDED,
                Condition.SCORED,
                Condition.PREVIOUS_DONE,
            }
        ),
    },
}

ORDER: dict[Schedule, AccumulationOrder] = {
    Schedule.SERIAL: AccumulationOrder.GROUP,
    Schedule.DISAGGREGATED: AccumulationOrder.GROUP,
    Schedule.ROLLPLEX: AccumulationOrder.GROUP,
    Schedule.FUSED: AccumulationOrder.COMPLETION,
}

PREFILL_FROM_LEASE: frozenset[Schedule] = frozenset({Schedule.FUSED})
"""Schedules whose rollout takes the policy prefix K/V instead of running a prefill of its own."""

OWN_WEIGHTS: frozenset[Schedule] = frozenset({Schedule.DISAGGREGATED})
"""Schedules whose rollout shares no weights or K/V with training: it has a copy of the policy's
weights, and encodes pictures itself."""
