from __future__ import annotations

import pytest
import torch

from common.rl.philox import philox4x32, uniforms

# Known answers for philox4x32-10 from the Random123 distribution: counter, key, result.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    words = philox4x32(torch.tensor(counter, dtype=torch.int64).unsqueeze(1), key)
    assert tuple(words.squeeze(1).tolist()) == expected


def test_known_answers_do_not_depend_on_neighbours():
    counters = torch.tensor([counter for counter, _, _ in KNOWN_ANSWERS], dtype=torch.int64).T
    key = KNOWN_ANSWERS[2][1]
    assert tuple(philox4x32(counters, key)[:, 2].tolist()) == KNOWN_ANSWERS[2][2]


def test_uniforms_use_every_word_of_the_counter_and_the_whole_seed():
    one = torch.ones(1, dtype=torch.int64)

    def draw(seed=5, step=1, group=1, sample=1, position=1):
        return uniforms(seed, step, one * group, one * sample, one * position).item()

    draws = {
        draw(),
        draw(seed=5 + 2**40),
        draw(seed=6),
        draw(step=2),
        draw(group=2),
        draw(sample=2),
        draw(position=2),
    }
    assert len(draws) == 7
    assert draw() == draw()


def test_uniforms_lie_in_the_half_open_interval_and_are_uniform():
    samples = torch.arange(8).unsqueeze(1)
    positions = torch.arange(25_000).unsqueeze(0)
    drawn = uniforms(1234, 7, torch.tensor(3), samples, positions)
    assert drawn.shape == (8, 25_000)
    assert drawn.dtype == torch.float64
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = torch.histc(drawn.reshape(-1), bins=100, min=0, max=1)
    # Chi-square with 99 degrees of freedom lies under 160 with probability 0.9999.
    assert ((counts - 2000) ** 2 / 2000).sum() < 160
    assert torch.corrcoef(drawn).fill_diagonal_(0).abs().max() < 0.04


def test_a_draw_does_not_depend_on_the_batch():
    groups, samples, positions = torch.arange(50), torch.arange(50) % 4, torch.arange(50) * 3
    together = uniforms(9, 2, groups, samples, positions)
    alone = [uniforms(9, 2, groups[i], samples[i], positions[i]).item() for i in range(50)]
    assert together.tolist() == alone
