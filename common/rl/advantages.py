"""Advantages from the rewards of a group's responses.

Shapes: G responses of one group, N responses of several groups.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from common.rl.errors import NonFiniteValue, ShapeError


class Scope(Enum):
    """Whose rewards an algorithm needs before it knows the advantages of one group."""

    SAMPLE = "sample"
    """The response's own."""
    GROUP = "group"
    """All responses of the group."""
    BATCH = "batch"
    """All responses of the step; a group can then be trained only after the last reward."""


ALGORITHM_SCOPES: dict[str, Scope] = {"grpo": Scope.GROUP}
"""Every algorithm by its name in the recipe."""

_STD_EPS = 1e-6


def group_advantages(rewards_G: Tensor, *, scale_by_std: bool) -> Tensor:
    """Centre, and on request scale, the rewards inside one group.

    Args:
        rewards_G: [G] floating point, any device, unitless.
        scale_by_std: divide by the sample standard deviation (G - 1 in its denominator) + 1e-6.
    Returns: [G] float64, same device; fresh storage. All 0 for a single response and for equal
        rewards, exactly.
    Raises: NonFiniteValue if a reward is NaN or infinite.
    """
    _check_finite(rewards_G)
    reward_G = rewards_G.to(torch.float64)
    # The spread, not the deviation, tells equal rewards: a rounded mean leaves a tiny deviation.
    if reward_G.numel() < 2 or bool(reward_G.max() == reward_G.min()):
        return torch.zeros_like(reward_G)
    centred_G = reward_G - reward_G.mean()
    if not scale_by_std:
        return centred_G
    return centred_G / (reward_G.std(correction=1) + _STD_EPS)


def advantages_by_group(rewards_N: Tensor, groups_N: Tensor, *, scale_by_std: bool) -> Tensor:
    """Apply `group_advantages` to each group of a batch; groups may be uneven and interleaved.

    Args:
        rewards_N: [N] floating point.
        groups_N: [N] int64, the group of every response.
    Returns: [N] float64, in the order of the input.
    Raises: ShapeError if the inputs disagree on N.
    """
    if rewards_N.shape != groups_N.shape or rewards_N.dim() != 1:
        raise ShapeError(
            f"rewards {tuple(rewards_N.shape)} and groups {tuple(groups_N.shape)}: "
            "must be two vectors of one length"
        )
    advantages_N = torch.zeros_like(rewards_N, dtype=torch.float64)
    for group in groups_N.unique().tolist():
        members_N = groups_N == group
        advantages_N[members_N] = group_advantages(rewards_N[members_N], scale_by_std=scale_by_std)
    return advantages_N


def _check_finite(rewards_G: Tensor) -> None:
    if not bool(torch.isfinite(rewards_G).all()):
        bad = int((~torch.isfinite(rewards_G)).nonzero()[0].item())
        raise NonFiniteValue(
            f"reward of response {bad} is {rewards_G[bad].item()}: must be finite", response=bad
        )
