from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from common.rl.config import AlgorithmConfig
from common.rl.errors import NonFiniteValue, ShapeError
from common.rl.losses import LossSums, ScoredResponses, policy_loss

CONFIG = AlgorithmConfig(clip_low=0.2, clip_high=0.3)


def scored(lengths, *, spread=0.6, seed=0):
    """Responses whose old, reference and engine log-probabilities differ from the present ones."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def noise():
        return torch.randn(tokens, dtype=torch.float64, generator=generator)

    logprobs = -noise().abs() - 0.1
    signs = torch.tensor([(-1.0) ** response for response in range(len(lengths))])
    return ScoredResponses(
        logprobs=logprobs.clone().requires_grad_(),
        lengths=torch.tensor(lengths),
        advantages=signs
        * (0.5 + torch.rand(len(lengths), dtype=torch.float64, generator=generator)),
        old_logprobs=logprobs + spread * noise(),
        reference_logprobs=logprobs + 0.2 * noise(),
        engine_logprobs=logprobs + 0.01 * noise(),
    )


def naive(batch, config):
    """Token by token, from the formula."""
    total = torch.zeros((), dtype=torch.float64)
    low = high = 0
    token = 0
    for advantage, length in zip(batch.advantages, batch.lengths.tolist(), strict=True):
        for _ in range(length):
            logprob = batch.logprobs[token]
            ratio = (logprob - batch.old_logprobs[token]).exp()
            if advantage >= 0 and ratio > 1 + config.clip_high:
                term = (1 + config.clip_high) * advantage
                high += int(advantage > 0)
            elif advantage < 0 and ratio < 1 - config.clip_low:
                term = (1 - config.clip_low) * advantage
                low += 1
            else:
                term = ratio * advantage
            total = total - term
            if config.kl_coefficient and config.kl_placement == "loss":
                d = logprob - batch.reference_logprobs[token]
                kl = d**2 / 2 if config.kl_estimator == "k2" else (-d).exp() - 1 + d
                total = total + config.kl_coefficient * kl
            token += 1
    return total, low, high


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        CONFIG.model_copy(update={"kl_coefficient": 0.3}),
        CONFIG.model_copy(update={"kl_coefficient": 0.3, "kl_estimator": "k2"}),
        AlgorithmConfig(kl_coefficient=0.3, kl_estimator="k1"),
    ],
    ids=["no-kl", "k3", "k2", "k1-in-reward"],
)
def test_loss_and_gradient_equal_a_naive_formula_with_clipping_on_both_sides(config):
    batch = scored([70, 120, 0, 1, 90])
    loss, sums = policy_loss(batch, config)
    (gradient,) = torch.autograd.grad(loss, batch.logprobs)
    expected, low, high = naive(batch, config)
    (expected_gradient,) = torch.autograd.grad(expected, batch.logprobs)
    assert low > 0
    assert high > 0
    assert (sums.clipped_low, sums.clipped_high) == (low, high)
    assert torch.allclose(loss, expected, rtol=1e-13)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-12, atol=1e-14)
    assert sums.loss == pytest.approx(expected.item(), rel=1e-12)


def test_without_old_log_probabilities_the_gradient_is_the_advantage():
    batch = dataclasses.replace(scored([3, 2]), old_logprobs=None)
    loss, sums = policy_loss(batch, CONFIG)
    (gradient,) = torch.autograd.grad(loss, batch.logprobs)
    assert torch.equal(gradient, -torch.repeat_interleave(batch.advantages, batch.lengths))
    assert (sums.ratio, sums.ratio_deviation_max, sums.clipped_high) == (5.0, 0.0, 0.0)


def test_the_split_into_micro_batches_changes_nothing():
    config = CONFIG.model_copy(update={"kl_coefficient": 0.1})
    whole = scored([4, 6, 0, 5, 3])
    loss, sums = policy_loss(whole, config)
    (gradient,) = torch.autograd.grad(loss, whole.logprobs)
    parts, gradients = [], []
    for responses, tokens in ((slice(0, 2), slice(0, 10)), (slice(2, 5), slice(10, 18))):
        part = ScoredResponses(
            logprobs=whole.logprobs.detach()[tokens].requires_grad_(),
            lengths=whole.lengths[responses],
            advantages=whole.advantages[responses],
            old_logprobs=whole.old_logprobs[tokens],
            reference_logprobs=whole.reference_logprobs[tokens],
            engine_logprobs=whole.engine_logprobs[tokens],
        )
        part_loss, part_sums = policy_loss(part, config)
        parts.append(part_sums)
        gradients.append(torch.autograd.grad(part_loss, part.logprobs)[0])
    assert torch.equal(torch.cat(gradients), gradient)
    merged = LossSums.merge(parts)
    for name, value in sums.as_dict().items():
        assert merged.as_dict()[name] == pytest.approx(value, rel=1e-12), name


def test_mismatch_compares_the_engine_with_the_weights_that_sampled():
    batch = ScoredResponses(
        logprobs=torch.tensor([-3.0, -3.0], dtype=torch.float64),
        lengths=torch.tensor([2]),
        advantages=torch.tensor([1.0]),
        old_logprobs=torch.tensor([-1.0, -2.0], dtype=torch.float64),
        engine_logprobs=torch.tensor([-1.0, -1.5], dtype=torch.float64),
    )
    _, sums = policy_loss(batch, CONFIG)
    assert sums.mismatch_abs_max == pytest.approx(0.5)
    assert sums.mismatch_k3 == pytest.approx(math.exp(-0.5) - 1 + 0.5)
    assert sums.means()["mismatch_k3"] == pytest.approx(sums.mismatch_k3 / 2)


def test_groups_without_gradient_count_in_the_loss_only():
    config = CONFIG.model_copy(update={"kl_coefficient": 0.1})
    _, sums = policy_loss(scored([5, 3]), config)
    alone = sums.means()
    diluted = LossSums.merge([LossSums(tokens=24.0), sums]).means()
    assert alone["measured_share"] == 1.0
    assert diluted["measured_share"] == 0.25
    assert diluted["loss"] == pytest.approx(alone["loss"] / 4)
    for name in set(alone) - {"measured_share", "loss"}:
        assert alone[name] != 0, name
        assert diluted[name] == alone[name], name


@pytest.mark.parametrize("parts", [[], [LossSums(tokens=12.0)]], ids=["all-dropped", "all-equal"])
def test_a_step_in_which_nothing_was_measured_has_the_means_of_an_idle_one(parts):
    means = LossSums.merge(parts).means()
    assert means.pop("ratio_mean") == 1.0
    assert set(means.values()) == {0.0}


def test_no_tokens_give_zero_and_a_gradient():
    logprobs = torch.zeros(0, requires_grad=True)
    batch = ScoredResponses(
        logprobs=logprobs, lengths=torch.tensor([0, 0]), advantages=torch.zeros(2)
    )
    loss, sums = policy_loss(batch, CONFIG)
    loss.backward()
    assert loss.item() == 0
    assert logprobs.grad.shape == (0,)
    assert sums == LossSums()
    assert all(math.isfinite(value) for value in sums.means().values())


def test_sums_survive_the_way_through_an_event():
    _, sums = policy_loss(scored([3]), CONFIG)
    assert LossSums.from_dict({**sums.as_dict(), "other": 1.0}) == sums


def test_wrong_inputs_are_named():
    batch = scored([3, 2])
    with pytest.raises(ShapeError, match="sum to 4, the packed row has 5"):
        policy_loss(dataclasses.replace(batch, lengths=torch.tensor([2, 2])), CONFIG)
    with pytest.raises(ShapeError, match="no length may be negative"):
        policy_loss(dataclasses.replace(batch, lengths=torch.tensor([6, -1])), CONFIG)
    with pytest.raises(ShapeError, match=r"advantages \(3,\), lengths \(2,\)"):
        policy_loss(dataclasses.replace(batch, advantages=torch.zeros(3)), CONFIG)
    with pytest.raises(ShapeError, match=r"old_logprobs \(4,\)"):
        policy_loss(dataclasses.replace(batch, old_logprobs=torch.zeros(4)), CONFIG)
    with pytest.raises(ShapeError, match=r"kl_coefficient = 0\.1 needs the reference"):
        policy_loss(
            dataclasses.replace(batch, reference_logprobs=None),
            CONFIG.model_copy(update={"kl_coefficient": 0.1}),
        )
    with pytest.raises(NonFiniteValue, match="nan"):
        policy_loss(dataclasses.replace(batch, advantages=torch.tensor([math.nan, 0.0])), CONFIG)
