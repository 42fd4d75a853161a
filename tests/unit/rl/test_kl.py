from __future__ import annotations

import pytest
import torch

from common.rl.advantages import group_advantages
from common.rl.errors import ShapeError
from common.rl.kl import KlEstimator, kl_per_token, rewards_with_kl

PROBABILITIES = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


@pytest.mark.parametrize("estimator", [KlEstimator.K1, KlEstimator.K3])
def test_k1_and_k3_are_unbiased(estimator):
    expected = (PROBABILITIES * (PROBABILITIES / REFERENCE).log()).sum()
    estimates = kl_per_token(PROBABILITIES.log(), REFERENCE.log(), estimator)
    assert torch.allclose((PROBABILITIES * estimates).sum(), expected, atol=1e-15)


def test_only_k1_is_ever_negative():
    def estimates(estimator):
        return kl_per_token(PROBABILITIES.log(), REFERENCE.log(), estimator)

    assert (estimates(KlEstimator.K1) < 0).any()
    assert (estimates(KlEstimator.K2) >= 0).all()
    assert (estimates(KlEstimator.K3) >= 0).all()


@pytest.mark.parametrize(
    ("estimator", "gradient_is_that_of_the_kl"),
    [(KlEstimator.K1, False), (KlEstimator.K2, True)],
)
def test_gradients_as_a_loss(estimator, gradient_is_that_of_the_kl):
    """k1's expected gradient is 0; k2's is the gradient of the KL."""
    logits = PROBABILITIES.log().clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    (logprobs.exp() * (logprobs - REFERENCE.log())).sum().backward()
    true_gradient = logits.grad.clone()
    logits.grad = None
    logprobs = logits.log_softmax(0)
    (PROBABILITIES * kl_per_token(logprobs, REFERENCE.log(), estimator)).sum().backward()
    expected = true_gradient if gradient_is_that_of_the_kl else torch.zeros(3, dtype=torch.float64)
    assert torch.allclose(logits.grad, expected, atol=1e-14)


def test_k3_keeps_its_precision_for_tiny_differences():
    logprobs = torch.full((1,), -1.0)
    estimate = kl_per_token(logprobs, logprobs - 1e-3, KlEstimator.K3)
    assert estimate.item() == pytest.approx(5e-7, rel=0.2)


def test_kl_in_the_reward_sums_over_each_response():
    adjusted = rewards_with_kl(
        torch.tensor([1.0, 1.0, 1.0]),
        torch.tensor([-1.0, -2.0, -3.0]),
        torch.tensor([-1.5, -1.0, -1.0]),
        torch.tensor([2, 0, 1]),
        coefficient=0.1,
    )
    assert torch.allclose(adjusted, torch.tensor([1.05, 1.0, 1.2]).double())
    with pytest.raises(ShapeError, match="sum to 2, the packed row has 3"):
        rewards_with_kl(
            torch.ones(1), torch.zeros(3), torch.zeros(3), torch.tensor([2]), coefficient=0.1
        )


def test_kl_in_the_reward_decides_between_equal_rewards_but_not_for_a_single_response():
    """With equal rewards, the response that is farther from the reference is worth less."""

    def advantages(lengths, scale_by_std):
        tokens = sum(lengths)
        adjusted = rewards_with_kl(
            torch.ones(len(lengths)),
            torch.arange(tokens, dtype=torch.float32).neg(),
            torch.full((tokens,), -2.0),
            torch.tensor(lengths),
            coefficient=0.5,
        )
        return group_advantages(adjusted, scale_by_std=scale_by_std).tolist()

    # k1 of the tokens is 2, 1, 0, -1, -2; of the responses 3 and -3
    assert advantages([2, 3], False) == [-1.5, 1.5]
    assert advantages([2, 3], True) == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)
    assert advantages([5], True) == [0.0]
    assert advantages([1, 1], False)[0] < 0


def test_kl_in_the_reward_gives_no_gradient():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    adjusted = rewards_with_kl(
        torch.ones(2), logprobs, torch.zeros(2), torch.tensor([1, 1]), coefficient=1.0
    )
    assert adjusted.tolist() == [2.0, 3.0]
    assert not adjusted.requires_grad
