"""The bound on the difference between what the engine reported and what the trainer scores."""

from __future__ import annotations

import math

import pytest

from common.rl.losses import LossSums
from services.learner.drift import EngineDrifted, check_drift


def sums(difference: float) -> LossSums:
    """Of 10 tokens with a difference of this root mean square."""
    return LossSums(mismatch_tokens=10.0, mismatch_k3=10 * difference**2 / 2)


def test_a_difference_within_the_bound_passes():
    check_drift(sums(0.09), 0.1)


@pytest.mark.parametrize("difference", [0.11, math.nan])
def test_a_larger_one_does_not(difference):
    with pytest.raises(EngineDrifted, match="logprob_bound"):
        check_drift(sums(difference), 0.1)


def test_without_a_bound_or_tokens_there_is_nothing_to_check():
    check_drift(sums(5.0), None)
    check_drift(LossSums(), 0.1)
