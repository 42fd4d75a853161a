from __future__ import annotations

import math

import pytest
import torch

from common.rl.advantages import ALGORITHM_SCOPES, Scope, advantages_by_group, group_advantages
from common.rl.errors import NonFiniteValue, ShapeError


def test_centred_advantages():
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), scale_by_std=False)
    assert advantages.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_scaled_advantages_use_the_sample_deviation():
    advantages = group_advantages(torch.tensor([1.0, 2.0, 3.0]), scale_by_std=True)
    assert torch.allclose(advantages, torch.tensor([-1.0, 0.0, 1.0]).double(), atol=2e-6)


@pytest.mark.parametrize("scale_by_std", [True, False])
@pytest.mark.parametrize("rewards", [[0.7], [0.1] * 3, [0.1] * 11, [1e9 + 0.1] * 7, []])
def test_singletons_and_equal_rewards_have_advantage_zero_exactly(rewards, scale_by_std):
    given = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(given, scale_by_std=scale_by_std)
    assert advantages.tolist() == [0.0] * len(rewards)


def test_groups_are_uneven_and_interleaved():
    rewards = torch.tensor([1.0, 5.0, 3.0, 0.1, 7.0, 0.1])
    groups = torch.tensor([4, 0, 4, 2, 4, 2])
    advantages = advantages_by_group(rewards, groups, scale_by_std=True)
    own = group_advantages(torch.tensor([1.0, 3.0, 7.0]), scale_by_std=True)
    assert advantages[groups == 4].tolist() == own.tolist()
    assert advantages[1] == 0
    assert advantages[groups == 2].tolist() == [0.0, 0.0]


def test_non_finite_rewards_and_shapes_are_refused_by_name():
    with pytest.raises(NonFiniteValue, match="reward of response 1 is nan"):
        group_advantages(torch.tensor([1.0, math.nan]), scale_by_std=False)
    with pytest.raises(ShapeError, match=r"\(2,\) and groups \(3,\)"):
        advantages_by_group(torch.zeros(2), torch.zeros(3, dtype=torch.int64), scale_by_std=False)


def test_every_algorithm_declares_its_scope():
    assert ALGORITHM_SCOPES == {"grpo": Scope.GROUP}
