"""The `[reward]` table of a recipe. Imports without torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from common.config.base import FrozenConfig


class RewardFunction(FrozenConfig):
    """One reward function and its share of the reward."""

    function: str
    """`module:function` or `path/to/file.py:function`, called as
    `function(completion: str, row: dict) -> float`."""
    weight: float = Field(default=1.0)
    """Factor of its value in the reward of a response that trains; 0: not called there."""
    eval_weight: float | None = Field(default=None)
    """Factor of its value in the reward of a held-out response; 0: not called there; unset: the
    same as `weight`. It keeps terms that only shape the training out of the accuracy."""

    @field_validator("function")
    @classmethod
    def _has_two_parts(cls, value: str) -> str:
        source, _, name = value.rpartition(":")
        if not source or not name.isidentifier():
            raise ValueError(f"{value!r}: must be 'module:function' or 'path/to/file.py:function'")
        return value


class RewardConfig(FrozenConfig):
    """How responses are rewarded. A response's reward is the weighted sum of all functions."""

    functions: tuple[RewardFunction, ...] = Field(min_length=1)
    """The reward functions; each is named once."""
    time_limit_s: float = Field(default=10.0, gt=0)
    """Longest run of one function on one response; its process is killed after that. A function may
    be called again on responses of the same group that it had finished before."""
    on_error: Literal["drop_group", "default", "stop"] = "drop_group"
    """What an exception, an overrun, a NaN or a value that is not a number leads to: the group
    takes no further part in the step, the function counts as `default_value`, or the run stops."""
    default_value: float = Field(default=0.0)
    """Value of a function that failed, before its weight; only with on_error = "default"."""
    workers: int = Field(default=1, ge=1)
    """Processes that run reward functions."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [function.function for function in self.functions]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"functions: {repeated[0]!r} is named more than once")
        if self.default_value != 0 and self.on_error != "default":
            raise ValueError(
                f"default_value = {self.default_value} with on_error = {self.on_error!r}: "
                'has a meaning only with on_error = "default"'
            )
        for evaluation, key in ((False, "weight"), (True, "eval_weight")):
            if not self.weights(evaluation=evaluation):
                raise ValueError(f"functions: one of them must have {key} other than 0")
        return self

    def weights(self, *, evaluation: bool) -> dict[str, float]:
        """The functions that are called in a step, in their order, and the weight of each.

        Args:
            evaluation: the step evaluates held-out responses.
        """
        weights = {
            function.function: (
                function.weight
                if function.eval_weight is None or not evaluation
                else function.eval_weight
            )
            for function in self.functions
        }
        return {name: weight for name, weight in weights.items() if weight != 0}
