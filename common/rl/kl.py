"""Estimators of KL(policy || reference) from the log-probabilities of sampled tokens.

With d = log policy(t) - log reference(t) for a token t sampled from the policy:

| name | value | unbiased estimate of the KL | gradient as a loss | where it may be used |
| --- | --- | --- | --- | --- |
| k1 | d | yes; may be negative | 0 on average: useless | in the reward only |
| k2 | d**2 / 2 | no; small bias near 0 | that of the KL, unbiased | in the loss only |
| k3 | exp(-d) - 1 + d | yes; never negative | biased away from 0 | in the loss only |

Shapes: T tokens of a packed row of responses, G responses.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from common.rl.packing import sum_per_response


class KlEstimator(StrEnum):
    """Which estimator; the module's table says where each may be used."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class KlPlacement(StrEnum):
    """Where the KL term enters."""

    REWARD = "reward"
    """Subtracted from each response's reward, before the advantages; no gradient of its own."""
    LOSS = "loss"
    """Added to each token's loss."""


LEGAL_PLACEMENT: dict[KlEstimator, KlPlacement] = {
    KlEstimator.K1: KlPlacement.REWARD,
    KlEstimator.K2: KlPlacement.LOSS,
    KlEstimator.K3: KlPlacement.LOSS,
}


def kl_per_token(
    logprobs_T: Tensor, reference_logprobs_T: Tensor, estimator: KlEstimator
) -> Tensor:
    """Estimate the KL divergence at every token.

    Args:
        logprobs_T: [T] floating point; log-probability under the policy that sampled the tokens.
        reference_logprobs_T: [T]; log-probability under the reference.
    Returns: [T]; differentiable with respect to the inputs.
    """
    difference_T = logprobs_T - reference_logprobs_T
    match estimator:
        case KlEstimator.K1:
            return difference_T
        case KlEstimator.K2:
            return difference_T.square() / 2
        case KlEstimator.K3:
            return torch.expm1(-difference_T) + difference_T


def rewards_with_kl(
    rewards_G: Tensor,
    logprobs_T: Tensor,
    reference_logprobs_T: Tensor,
    lengths_G: Tensor,
    *,
    coefficient: float,
) -> Tensor:
    """Subtract coefficient x (sum of k1 over the response) from each response's reward.

    Args:
        rewards_G: [G] floating point.
        logprobs_T: [T]; as recorded while sampling. Detached here.
        reference_logprobs_T: [T].
        lengths_G: [G] int64, tokens of each response; they sum to T.
    Returns: [G] float64; fresh storage.
    Raises: ShapeError if the inputs disagree.
    """
    k1_T = kl_per_token(
        logprobs_T.detach().to(torch.float64),
        reference_logprobs_T.detach().to(torch.float64),
        KlEstimator.K1,
    )
    return rewards_G.to(torch.float64) - coefficient * sum_per_response(k1_T, lengths_G)
