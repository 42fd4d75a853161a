"""What the ranks compute: the same step at every tensor-parallel degree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from common.rl.config import AlgorithmConfig
from common.rl.sampling import SamplingParams
from common.vlm.loading import suppressed_token_ids
from common.vlm.tiny import tiny_config
from common.vlm.verification_cases import make_case

TEMPERATURE = 0.7
ALGORITHM = AlgorithmConfig(weight_decay=0.1, max_grad_norm=0.5, learning_rate=1e-4)
TOKENS = 14
"""By which the update divides."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    dtype: torch.dtype
    tied: bool
    vision_heads: int
    """Two are whole on each of four ranks, four are split."""
    train_vision: bool
    checkpointing: bool
    tolerance: float
    hidden_size: int = 32
    decoded_groups: int = 3
    new_tokens: int = 6

    @property
    def config(self) -> Any:
        return tiny_config(
            vocab_size=48,
            hidden_size=self.hidden_size,
            intermediate_size=48,
            tie_word_embeddings=self.tied,
            vision_heads=self.vision_heads,
        )

    @property
    def cases(self) -> list[Any]:
        return [
            make_case(self.config, (3, 0, 4), seed=1, images=[(1, 4, 8)], text_tokens=3),
            make_case(self.config, (2, 2), seed=2, text_tokens=1),
            make_case(self.config, (1, 2), seed=3, text_tokens=6),
        ]

    def sampling(self, *, greedy: bool, top_k: int = 0) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self.new_tokens,
            stop_token_ids=(8, 9, 10),
            temperature=0.0 if greedy else TEMPERATURE,
            top_k=top_k,
            suppressed_token_ids=suppressed_token_ids(self.config),
        )


SCENARIOS = {
    "split tower, own head": Scenario(
        dtype=torch.float64,
        tied=False,
        vision_heads=4,
        train_vision=True,
        checkpointing=True,
        tolerance=1e-10,
    ),
    "whole tower, tied head": Scenario(
        dtype=torch.float32,
        tied=True,
        vision_heads=2,
        train_vision=True,
        checkpointing=False,
        tolerance=1e-5,
    ),
    "frozen tower": Scenario(
        dtype=torch.float32,
        tied=False,
        vision_heads=4,
        train_vision=False,
        checkpointing=False,
        tolerance=1e-5,
    ),
}

FUSED = {
    name: replace(
        scenario,
        dtype=torch.float32,
        tolerance=1e-5,
        hidden_size=64,
        decoded_groups=2,
        new_tokens=3,
    )
    for name, scenario in SCENARIOS.items()
    if scenario.train_vision
}
"""Fused kernels are for float32 and narrower; the device decoder wants heads of 16 at least."""
