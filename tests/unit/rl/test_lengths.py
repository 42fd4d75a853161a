from __future__ import annotations

import statistics

import pytest
from pydantic import ValidationError

from common.rl.lengths import LengthsConfig, response_lengths


def _lengths(config, *, seed=7, step=1, groups=64, samples=16):
    return [
        length
        for group in range(groups)
        for length in response_lengths(config, seed=seed, step=step, group=group, samples=samples)
    ]


def test_lengths_follow_from_the_seed_alone():
    config = LengthsConfig(kind="uniform", max_tokens=1 << 20)
    assert _lengths(config) == _lengths(config)
    assert _lengths(config) != _lengths(config, seed=8)
    assert _lengths(config) != _lengths(config, step=2)
    assert len(set(_lengths(config))) > 1000


def test_fewer_samples_are_the_first_ones():
    config = LengthsConfig(kind="uniform", max_tokens=1000)
    four = response_lengths(config, seed=1, step=0, group=0, samples=4)
    assert response_lengths(config, seed=1, step=0, group=0, samples=8)[:4] == four


def test_heavy_tail_has_the_median_and_reaches_the_limit():
    config = LengthsConfig(kind="heavy-tail", max_tokens=1024, median_tokens=300)
    lengths = _lengths(config)
    assert abs(statistics.median(lengths) - 300) < 30
    assert max(lengths) == 1024
    assert min(lengths) >= 1
    assert statistics.mean(lengths) > 320


def test_uniform_and_fixed_keep_their_range():
    uniform = _lengths(LengthsConfig(kind="uniform", min_tokens=3, max_tokens=5))
    assert set(uniform) == {3, 4, 5}
    assert set(_lengths(LengthsConfig(kind="fixed", max_tokens=9))) == {9}


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "heavy-tail", "max_tokens": 8},
        {"kind": "fixed", "max_tokens": 8, "median_tokens": 4},
        {"kind": "heavy-tail", "max_tokens": 8, "median_tokens": 9},
        {"kind": "uniform", "max_tokens": 8, "min_tokens": 9},
    ],
)
def test_values_that_contradict_each_other_are_refused(values):
    with pytest.raises(ValidationError):
        LengthsConfig(**values)
