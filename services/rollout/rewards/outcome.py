"""From the evaluations of a group's responses to its rewards, failures and timings.

Shapes: G responses of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.rollout.rewards.errors import RewardFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.ids import GroupId
    from common.rl.reward_config import RewardConfig
    from services.rollout.rewards.worker import Evaluation, FailureKind

Pair = tuple[str, int]
"""A function's name and the index of a response in its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailure:
    """One function that gave no usable value for one response."""

    function: str
    sample: int
    """Index of the response in its group."""
    kind: FailureKind
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTiming:
    """How long one function took on the responses of a group."""

    evaluations: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0
    longest_sample: int = -1
    """Index of the response that took longest; -1: none was evaluated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutcome:
    """The rewards of one group; the mappings name the functions that were called in the step."""

    group: GroupId
    dropped: bool
    """The group takes no further part in the step; the failures say why."""
    rewards: tuple[float, ...]
    """G weighted sums; empty if dropped."""
    values: Mapping[str, tuple[float, ...]]
    """G values of each function before its weight; empty if dropped."""
    failures: tuple[RewardFailure, ...]
    """In the order of the functions, then of the responses."""
    timings: Mapping[str, FunctionTiming]


def reward_outcome(
    config: RewardConfig,
    group: GroupId,
    responses: int,
    weights: Mapping[str, float],
    evaluations: Mapping[Pair, Evaluation],
) -> RewardOutcome:
    """Apply the recipe's policy for failures, and weigh.

    Args:
        config: its policy and default value.
        group: for names.
        responses: G.
        weights: the functions that were called, by name.
        evaluations: of every function and response; some may be missing where a failure makes the
            others needless.
    Raises: RewardFailed if a function failed and the recipe says that the run stops.
    """
    results = {
        (name, sample): evaluations[name, sample]
        for name in weights
        for sample in range(responses)
        if (name, sample) in evaluations
    }
    failures = tuple(
        RewardFailure(function=name, sample=sample, kind=result.failure, cause=result.cause)
        for (name, sample), result in results.items()
        if result.failure is not None
    )
    if failures and config.on_error == "stop":
        raise _stop(group, failures[0])
    dropped = bool(failures) and config.on_error == "drop_group"
    values: dict[str, tuple[float, ...]] = {}
    rewards: tuple[float, ...] = ()
    if not dropped:
        usable = {
            pair: config.default_value if result.failure else result.value
            for pair, result in results.items()
        }
        values = {name: tuple(usable[name, i] for i in range(responses)) for name in weights}
        rewards = tuple(
            sum(weight * values[name][i] for name, weight in weights.items())
            for i in range(responses)
        )
    return RewardOutcome(
        group=group,
        dropped=dropped,
        rewards=rewards,
        values=values,
        failures=failures,
        timings={name: timing(name, results) for name in weights},
    )


def timing(name: str, evaluations: Mapping[Pair, Evaluation]) -> FunctionTiming:
    """How long one function took on what it was called for."""
    elapsed = {
        sample: result.elapsed_s
        for (function, sample), result in evaluations.items()
        if function == name
    }
    if not elapsed:
        return FunctionTiming()
    slowest = max(elapsed, key=lambda sample: elapsed[sample])
    return FunctionTiming(
        evaluations=len(elapsed),
        total_s=sum(elapsed.values()),
        longest_s=elapsed[slowest],
        longest_sample=slowest,
    )


def _stop(group: GroupId, failure: RewardFailure) -> RewardFailed:
    return RewardFailed(
        f"reward function {failure.function!r} on response {failure.sample} of group {group}: "
        f"{failure.kind.value}: {failure.cause}",
        function=failure.function,
        group=int(group),
        sample=failure.sample,
        kind=failure.kind.value,
        cause=failure.cause,
    )
