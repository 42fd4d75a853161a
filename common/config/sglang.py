"""The `[rollout.sglang]` table of a recipe: how SGLang is run as the rollout's engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from common.config.base import FrozenConfig

_SET_ELSEWHERE = {
    "enable_memory_saver": "release_memory",
    "tp_size": "rollout_tp (deployment)",
    "dp_size": "dp (deployment)",
}


class SglangConfig(FrozenConfig):
    """SGLang as the rollout's engine."""

    weights: Literal["alias", "copy"] = "alias"
    """`alias`: the engine reads the policy's weights in place, and copies within the device what
    lies otherwise than it wants. `copy`: it has its own weights, written anew before each step."""
    bucket_mib: int = Field(default=256, ge=1)
    """With `copy`: weights that travel at a time, in MiB."""
    kv_tokens: int | None = Field(default=None, ge=1)
    """Places for keys and values. Unset: for `max_slots` responses of full length, and one prompt
    of full length for each group of them."""
    release_memory: bool = True
    """Whether the places for keys and values are given back to the device while nothing decodes,
    by SGLang's memory saver. On a CPU SGLang keeps them all the same."""
    process_mib: int = Field(default=4096, ge=0)
    """Of a GPU's memory, that is reserved for what the engine's processes take beside places and
    weights, for as long as the run is loaded: contexts, CUDA graphs, activations. In MiB."""
    memory_fraction: float = Field(default=0.5, gt=0, lt=1)
    """Of a GPU's memory, that the engine may come to use, weights included."""
    deterministic: bool = False
    """Whether logits do not depend on what else is in the batch, by SGLang's deterministic
    inference: on a GPU only, and slower. Responses are drawn by the run's seed either way."""
    logprob_bound: float = Field(default=0.1, gt=0)
    """Largest difference between the engine's and the trainer's log-probability of a token at the
    first step's gate; a run that passes it is refused."""
    start_s: float = Field(default=240.0, gt=0)
    """From the start of the engine's processes to their first answer, in seconds."""
    deadline_s: float = Field(default=120.0, gt=0)
    """Longest silence of the engine while it decodes or is asked something, in seconds; its
    processes are ended then, and started again for the next attempt at the step."""
    arguments: dict[str, bool | int | float | str | list[int]] = Field(default_factory=dict)
    """Further arguments of SGLang's engine, by its names, such as `attention_backend`."""

    @field_validator("arguments")
    @classmethod
    def _only_further_ones(
        cls, arguments: dict[str, bool | int | float | str | list[int]]
    ) -> dict[str, bool | int | float | str | list[int]]:
        for name, owner in _SET_ELSEWHERE.items():
            if name in arguments:
                raise ValueError(f"{name} is set by {owner}")
        return arguments
