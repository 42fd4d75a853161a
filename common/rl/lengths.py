"""Responses of set lengths, for measurements: the `[rollout.lengths]` table of a recipe.

A length is a pure function of the run's seed, step, group and sample, so that every schedule
decodes the same work. Imports without torch.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from common.config.base import FrozenConfig

_STREAM = 0x1E46
"""Keeps these numbers apart from others that are drawn with the run's seed."""
_WORDS = 1 << 64


class LengthsConfig(FrozenConfig):
    """From which distribution the lengths are drawn."""

    kind: Literal["fixed", "uniform", "heavy-tail"]
    """`fixed`: all are `max_tokens`; `uniform`: from `min_tokens` to `max_tokens`; `heavy-tail`:
    log-normal around `median_tokens`, cut off at `min_tokens` and `max_tokens`."""
    max_tokens: int = Field(ge=1)
    """Longest response."""
    min_tokens: int = Field(default=1, ge=1)
    """Shortest response; not for `fixed`."""
    median_tokens: int | None = Field(default=None, ge=1)
    """Middle of the heavy tail; only and always there."""
    sigma: float = Field(default=0.75, gt=0)
    """Standard deviation of the logarithm of the heavy tail."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens = {self.min_tokens}: legal is at most max_tokens = {self.max_tokens}"
            )
        if (self.median_tokens is not None) != (self.kind == "heavy-tail"):
            raise ValueError(
                f"median_tokens = {self.median_tokens} with kind = {self.kind!r}: set it for "
                '"heavy-tail", and only there'
            )
        if self.median_tokens is not None and not (
            self.min_tokens <= self.median_tokens <= self.max_tokens
        ):
            raise ValueError(
                f"median_tokens = {self.median_tokens}: legal is from min_tokens = "
                f"{self.min_tokens} to max_tokens = {self.max_tokens}"
            )
        return self


def response_lengths(
    config: LengthsConfig, *, seed: int, step: int, group: int, samples: int
) -> tuple[int, ...]:
    """Tokens of every response of a group, in sample order."""
    return tuple(_length(config, _uniform(seed, step, group, sample)) for sample in range(samples))


def _length(config: LengthsConfig, uniform: float) -> int:
    low, high = config.min_tokens, config.max_tokens
    if config.median_tokens is not None:
        spread = np.exp(config.sigma * NormalDist().inv_cdf(uniform))
        return int(min(high, max(low, round(config.median_tokens * float(spread)))))
    if config.kind == "uniform":
        return low + int(uniform * (high - low + 1))
    return high


def _uniform(seed: int, step: int, group: int, sample: int) -> float:
    """In (0, 1), both ends excluded."""
    counter = [0, step, group, sample]
    word = int(np.random.Philox(counter=counter, key=[seed % _WORDS, _STREAM]).random_raw())
    return ((word >> 12) + 0.5) / (1 << 52)
