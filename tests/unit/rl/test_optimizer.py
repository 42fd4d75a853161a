from __future__ import annotations

import math

import pytest
import torch

from common.errors import InvalidArgument
from common.rl.config import AlgorithmConfig
from common.rl.errors import ShapeError
from common.rl.optimizer import (
    FlatAdamW,
    clip_by_global_norm,
    normalise,
    ready_gradients,
)

CONFIG = AlgorithmConfig(learning_rate=1e-2, weight_decay=0.1)
SIZE, DECAY = 96, 64


def gradients(step):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 + step))


def fresh():
    return torch.linspace(-1, 1, SIZE), torch.zeros(2, SIZE)


def optimizer(master, moments, version=0, decay=DECAY):
    return FlatAdamW(master, moments, decay_elements=decay, version=version, config=CONFIG)


def test_equals_torch_adamw_on_separate_parameters():
    master, moments = fresh()
    flat = optimizer(master, moments)
    plain = [
        torch.nn.Parameter(torch.linspace(-1, 1, SIZE)[part].clone())
        for part in (slice(0, DECAY), slice(DECAY, SIZE))
    ]
    reference = torch.optim.AdamW(
        [{"params": plain[:1], "weight_decay": 0.1}, {"params": plain[1:], "weight_decay": 0.0}]
    )
    for step in range(5):
        flat.step(gradients(step), learning_rate=1e-2)
        plain[0].grad, plain[1].grad = gradients(step)[:DECAY], gradients(step)[DECAY:]
        for group in reference.param_groups:
            group["lr"] = 1e-2
        reference.step()
    assert torch.allclose(master, torch.cat([p.detach() for p in plain]), atol=1e-6, rtol=0)
    assert torch.allclose(
        moments[1], torch.cat([reference.state[p]["exp_avg_sq"] for p in plain]), atol=1e-7
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_continues_bit_for_bit_from_saved_masters_and_moments(dtype):
    def gradients(step):
        return torch.randn(SIZE, generator=torch.Generator().manual_seed(step)).to(dtype)

    master, moments = (tensor.to(dtype) for tensor in fresh())
    through = optimizer(master, moments)
    for step in range(3):
        through.step(gradients(step), learning_rate=1e-2)
    saved_master, saved_moments = master.clone(), moments.clone()
    resumed = optimizer(saved_master, saved_moments, version=3)
    for step in range(3, 6):
        through.step(gradients(step), learning_rate=1e-2)
        resumed.step(gradients(step), learning_rate=1e-2)
    assert torch.equal(saved_master, master)
    assert torch.equal(saved_moments, moments)
    wrong_count = optimizer(saved_master, saved_moments, version=0)
    wrong_count.step(gradients(6), learning_rate=1e-2)
    through.step(gradients(6), learning_rate=1e-2)
    assert not torch.equal(saved_master, master)


def test_works_in_place_on_given_storage_and_leaves_the_gradients():
    storage = torch.zeros(3, SIZE)
    storage[0] = 1
    flat = optimizer(storage[0], storage[1:])
    given = gradients(0)
    flat.step(given, learning_rate=1e-2)
    assert (storage[0] != 1).all()
    assert (storage[2] > 0).all()
    assert torch.equal(given, gradients(0))


@pytest.mark.parametrize("decay", [0, SIZE])
def test_one_of_the_two_parts_may_be_empty(decay):
    master, moments = fresh()
    optimizer(master, moments, decay=decay).step(torch.zeros(SIZE), learning_rate=0.5)
    shrunk = torch.linspace(-1, 1, SIZE) * (0.95 if decay else 1.0)
    assert torch.allclose(master, shrunk)


def test_padding_stays_zero():
    master, moments = fresh()
    master[50:60] = 0
    given = gradients(0)
    given[50:60] = 0
    optimizer(master, moments).step(given, learning_rate=1e-2)
    assert (master[50:60] == 0).all()


def test_gradients_are_normalised_then_clipped():
    given = torch.zeros(SIZE)
    given[:2] = torch.tensor([30.0, 40.0])
    report = ready_gradients(given, tokens=10, max_norm=1.0, learning_rate=1e-2)
    assert report.applied
    assert report.clipped
    assert report.gradient_norm == pytest.approx(5.0)
    assert given[:2].tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_is_not_to_be_applied(bad):
    given = gradients(0)
    given[7] = bad
    report = ready_gradients(given, tokens=10, max_norm=1.0, learning_rate=1e-2)
    assert not report.applied
    assert not report.clipped
    assert not math.isfinite(report.gradient_norm)


def test_norm_does_not_overflow_and_small_gradients_stay():
    assert clip_by_global_norm(torch.full((4,), 1e30), 1.0) == pytest.approx(2e30)
    small = torch.tensor([0.3, 0.4])
    assert clip_by_global_norm(small, 1.0) == pytest.approx(0.5)
    assert small.tolist() == pytest.approx([0.3, 0.4])


def test_the_norm_of_parts_is_the_norm_of_all(monkeypatch):
    monkeypatch.setattr("common.rl.optimizer.NORM_PART", 10)
    values = torch.arange(1.0, 34.0)
    expected = float(values.double().norm())
    assert clip_by_global_norm(values, 1e9) == pytest.approx(expected, rel=1e-15)
    assert clip_by_global_norm(torch.tensor([1.0] * 11 + [math.nan]), 1.0) != expected


def test_an_update_without_tokens_is_refused():
    with pytest.raises(InvalidArgument, match="response tokens of the step = 0"):
        normalise(torch.zeros(2), 0)


def test_disagreeing_slices_are_refused():
    with pytest.raises(ShapeError, match=r"moments \(2, 3\)"):
        optimizer(torch.zeros(4), torch.zeros(2, 3), decay=0)
    with pytest.raises(ShapeError, match=r"gradients \(3,\)"):
        optimizer(torch.zeros(4), torch.zeros(2, 4), decay=0).step(
            torch.zeros(3), learning_rate=1.0
        )
