"""Learning rate of a step: linear warm-up, then constant or cosine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.rl.config import AlgorithmConfig


def learning_rate(step: int, total_steps: int, config: AlgorithmConfig) -> float:
    """Learning rate of the update that step `step` ends with.

    Args:
        step: from 0; the warm-up ends with step `warmup_steps - 1` at the highest rate.
        total_steps: steps of the whole run; the cosine ends with step `total_steps - 1`.
    """
    highest = config.learning_rate
    if step < config.warmup_steps:
        return highest * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return highest
    span = total_steps - 1 - config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / span) if span > 0 else 1.0
    lowest = highest * config.min_lr_ratio
    return lowest + (highest - lowest) * (1 + math.cos(math.pi * progress)) / 2
