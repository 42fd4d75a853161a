from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidArgument
from common.rl.sampling import SamplingParams, sample, score

ALMOST_ONE = 1 - 2.0**-53


def params(**changes):
    return SamplingParams(**{"max_new_tokens": 8, "stop_token_ids": (0,), **changes})


def draw(logits, uniform, **changes):
    tokens, logprobs = sample(
        torch.as_tensor(logits)[None],
        torch.tensor([uniform], dtype=torch.float64),
        params(**changes),
    )
    return int(tokens), float(logprobs)


def reachable(logits, **changes):
    """All tokens that a fine grid of uniforms gives."""
    uniforms = torch.linspace(0, ALMOST_ONE, 4001, dtype=torch.float64)
    rows = torch.as_tensor(logits).expand(4001, -1)
    return set(sample(rows, uniforms, params(**changes))[0].tolist())


def test_frequencies_follow_the_softmax_at_the_temperature():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1])
    uniforms = torch.rand(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = sample(logits.expand(200_000, -1), uniforms, params(temperature=0.7))
    expected = (logits.double() / 0.7).softmax(0)
    counts = torch.bincount(tokens, minlength=5)
    chi_square = ((counts - 200_000 * expected) ** 2 / (200_000 * expected)).sum()
    assert chi_square < 23.5  # 4 degrees of freedom: exceeded with probability 0.0001
    assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-14, rtol=0)


def test_greedy_takes_the_lowest_of_equal_maxima_and_scores_at_temperature_one():
    token, logprob = draw([1.0, 3.0, 3.0, 0.0], ALMOST_ONE, temperature=0.0)
    assert token == 1
    expected = torch.tensor([1.0, 3.0, 3.0, 0.0], dtype=torch.float64).log_softmax(0)[1].item()
    assert logprob == pytest.approx(expected, abs=1e-14)


def test_top_k_keeps_exactly_k_and_ranks_ties_by_id():
    assert reachable([1.0, 1.0, 1.0, 0.9], top_k=2) == {0, 1}
    assert reachable([1.0, 2.0, 1.0, 3.0], top_k=3) == {0, 1, 3}
    assert reachable([1.0, 2.0], top_k=50) == {0, 1}


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    assert reachable(logits, top_p=0.39) == {3}
    assert reachable(logits, top_p=0.41) == {2, 3}
    assert reachable(logits, top_p=0.71) == {1, 2, 3}
    assert reachable(logits, top_p=1e-9) == {3}


def test_top_p_applies_to_what_top_k_left():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    # Of {3, 2} renormalised, token 3 alone has 0.571.
    assert reachable(logits, top_k=2, top_p=0.57) == {3}
    assert reachable(logits, top_k=2, top_p=0.58) == {2, 3}


def test_truncated_sampling_is_proportional_to_the_kept_tokens():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    assert draw(logits, 0.0, top_k=2)[0] == 2
    assert draw(logits, 0.3 / 0.7 - 1e-6, top_k=2)[0] == 2
    assert draw(logits, 0.3 / 0.7 + 1e-6, top_k=2)[0] == 3


def test_logprob_is_that_of_the_distribution_that_is_not_truncated():
    logits = [0.5, 0.1, 2.0, -1.0]
    expected = (torch.tensor(logits, dtype=torch.float64) / 1.5).log_softmax(0)
    token, logprob = draw(logits, 0.9, top_k=1, temperature=1.5)
    assert token == 2
    assert logprob == pytest.approx(expected[2].item(), abs=1e-7)


def test_suppressed_tokens_are_never_sampled_and_leave_the_distribution():
    logits = [5.0, 1.0, 4.0, 0.0]
    assert reachable(logits, suppressed_token_ids=(0, 2)) == {1, 3}
    assert draw(logits, 0.0, suppressed_token_ids=(0, 2), temperature=0.0)[0] == 1
    _, logprob = draw(logits, 0.0, suppressed_token_ids=(0, 2))
    assert logprob == pytest.approx(-math.log1p(math.exp(-1.0)), abs=1e-12)


def test_given_tokens_score_as_if_they_had_been_sampled():
    logits = torch.randn(50, 20, generator=torch.Generator().manual_seed(3))
    uniforms = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    chosen = params(temperature=0.8, top_k=3, suppressed_token_ids=(4, 5))
    tokens, logprobs = sample(logits, uniforms, chosen)
    assert torch.equal(score(logits, tokens, chosen), logprobs)
    assert score(logits, torch.full((50,), 4), chosen).tolist() == [-math.inf] * 50


def test_a_forbidden_stop_is_not_sampled_but_keeps_its_share_of_the_log_probability():
    logits = torch.tensor([[9.0, 1.0, 1.0]]).expand(2, -1)
    tokens, logprobs = sample(
        logits,
        torch.zeros(2, dtype=torch.float64),
        params(),
        stop_forbidden_R=torch.tensor([True, False]),
    )
    assert tokens.tolist() == [1, 0]
    assert logprobs[0].item() == pytest.approx(logits[0].double().log_softmax(0)[1].item())


@pytest.mark.parametrize("uniform", [0.0, ALMOST_ONE])
def test_the_ends_of_the_interval_give_tokens_of_positive_probability(uniform):
    logits = torch.full((1000,), -math.inf)
    logits[300:700] = torch.randn(400, generator=torch.Generator().manual_seed(2))
    token, logprob = draw(logits, uniform)
    assert token == (300 if uniform == 0 else 699)
    assert math.isfinite(logprob)


def test_underflowing_tail_is_not_reached_by_a_uniform_near_one():
    token, _ = draw([0.0, 0.0, -1e4, -1e4], ALMOST_ONE)
    assert token == 1


def test_non_finite_logits_give_a_nan_log_probability_for_their_row_alone():
    logits = torch.tensor([[0.0, math.nan, 1.0], [0.0, 0.0, 1.0]])
    tokens, logprobs = sample(logits, torch.tensor([0.5, 0.5], dtype=torch.float64), params())
    assert 0 <= int(tokens[0]) < 3
    assert logprobs.isnan().tolist() == [True, False]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(2, 9),
    vocab=st.integers(1, 70),
    top_k=st.integers(0, 8),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
)
def test_a_row_does_not_depend_on_the_others(seed, rows, vocab, top_k, top_p, temperature):
    generator = torch.Generator().manual_seed(seed)
    # Coarse values make ties.
    logits = (torch.randn(rows, vocab, generator=generator) * 4).round() / 2
    uniforms = torch.rand(rows, dtype=torch.float64, generator=generator)
    chosen = params(top_k=top_k, top_p=top_p, temperature=temperature)
    tokens, logprobs = sample(logits, uniforms, chosen)
    order = torch.randperm(rows, generator=generator)
    permuted_tokens, permuted_logprobs = sample(logits[order], uniforms[order], chosen)
    assert torch.equal(permuted_tokens, tokens[order])
    assert torch.equal(permuted_logprobs.float(), logprobs[order].float())
    for row in range(rows):
        token, logprob = sample(logits[row : row + 1], uniforms[row : row + 1], chosen)
        assert int(token) == int(tokens[row])
        assert logprob.float().item() == logprobs[row].float().item()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.integers(1, 40),
    top_k=st.integers(0, 8),
    top_p=st.floats(0.05, 1.0),
)
def test_sampled_tokens_lie_in_the_set_of_a_plain_definition(seed, vocab, top_k, top_p):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(vocab, generator=generator) * 3).round()
    uniforms = torch.rand(64, dtype=torch.float64, generator=generator)
    tokens, _ = sample(logits.expand(64, -1), uniforms, params(top_k=top_k, top_p=top_p))
    ranked = sorted(range(vocab), key=lambda token: (-logits[token].item(), token))
    ranked = ranked[: top_k or vocab]
    weights = [math.exp(logits[token].item()) for token in ranked]
    kept, mass = set(), 0.0
    for token, weight in zip(ranked, weights, strict=True):
        if kept and mass >= top_p * sum(weights) * (1 + 1e-12):
            break
        kept.add(token)
        mass += weight
    assert set(tokens.tolist()) <= kept


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"min_new_tokens": 9}, "min_new_tokens"),
    ],
)
def test_illegal_parameters_are_named_with_their_value(changes, key):
    with pytest.raises(InvalidArgument, match=f"{key} = "):
        params(**changes)
