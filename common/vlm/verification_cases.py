"""Groups that between them use every shape that a prompt and its responses can have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from common.vlm.loading import text_config
from common.vlm.tiny import FIRST_TEXT_ID, tiny_prompt
from common.vlm.verification import SplitCase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import Qwen2_5_VLConfig

CASES: dict[str, dict[str, Any]] = {
    "one image, one response empty": {"lengths": (5, 1, 0, 9), "images": [(1, 6, 8)]},
    "several images, one response": {
        "lengths": (7,),
        "images": [(1, 6, 8), (1, 4, 4), (1, 10, 6)],
    },
    "a video of half-second patches": {
        "lengths": (4, 4, 3),
        "videos": [(3, 4, 6)],
        "seconds_per_grid": 0.5,
    },
    "image and videos": {
        "lengths": (2, 6),
        "images": [(1, 4, 4)],
        "videos": [(2, 8, 4), (1, 2, 2)],
    },
    "text only": {"lengths": (4, 0, 3), "text_tokens": 7},
    "one token": {"lengths": (4, 1, 3), "text_tokens": 1},
}


def responses(
    config: Qwen2_5_VLConfig, lengths: Sequence[int], *, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Random text tokens: one [n] int64 a length."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = text_config(config).vocab_size
    return tuple(
        torch.randint(FIRST_TEXT_ID, vocabulary, (length,), generator=generator)
        for length in lengths
    )


def make_case(
    config: Qwen2_5_VLConfig, lengths: Sequence[int], seed: int = 0, **prompt: Any
) -> SplitCase:
    """One group; `prompt` as `tiny_prompt` takes it."""
    return SplitCase(
        prompt=tiny_prompt(config, seed=seed, **prompt),
        responses=responses(config, lengths, seed=seed + 100),
    )


def all_cases(config: Qwen2_5_VLConfig) -> list[SplitCase]:
    """Every case of `CASES`."""
    return [make_case(config, seed=i, **kwargs) for i, kwargs in enumerate(CASES.values())]
