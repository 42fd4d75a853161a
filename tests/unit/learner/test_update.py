"""An update in parts is the update of the whole, bit for bit."""

from __future__ import annotations

import pytest
import torch

from common.rl.config import AlgorithmConfig
from services.learner.step import room_for_all
from services.learner.update import update_part
from tests.unit.learner.conftest import gaps_are_whole, masters_of, moments_of

CONFIG = AlgorithmConfig(learning_rate=1e-2, weight_decay=0.1)
STEPS = 3


def updated(state):
    """The state after a few updates."""
    generator = torch.Generator().manual_seed(11)
    for version in range(STEPS):
        gradients = torch.randn(state.gradients.numel(), generator=generator)
        state.gradients.copy_(gradients)
        for part in state.parts:
            update_part(state, part, version=version, learning_rate=1e-2, config=CONFIG)
        assert torch.equal(state.gradients, gradients.to(state.dtype))
    return state


@pytest.mark.parametrize("parts", [2, 3, 7, 196])
@pytest.mark.parametrize(
    ("dtype", "separate"), [(torch.float32, False), (torch.bfloat16, True)], ids=str
)
def test_parts_change_no_bit(make_state, parts, dtype, separate):
    """Float32 weights are their own masters; bfloat16 ones have masters beside them."""
    kind = {"seed": 5, "dtype": dtype, "separate_masters": separate}
    whole, cut = updated(make_state(**kind)), updated(make_state(**kind, parts=parts))
    before = make_state(**kind)
    assert not torch.equal(masters_of(whole), masters_of(before))
    assert torch.equal(masters_of(cut), masters_of(whole))
    assert torch.equal(moments_of(cut), moments_of(whole))
    assert torch.equal(cut.weights, whole.weights)
    size = cut.layout.trainable_elements
    assert torch.equal(cut.weights[:size], masters_of(cut).to(dtype))
    assert torch.equal(cut.weights[size:], before.weights[size:])


@pytest.mark.parametrize("parts", [1, 3, 7])
@pytest.mark.parametrize(
    ("dtype", "separate"), [(torch.float32, False), (torch.bfloat16, True)], ids=str
)
def test_gaps_between_the_weights_change_no_bit_and_stay_as_they_are(
    make_state, parts, dtype, separate
):
    kind = {"seed": 5, "dtype": dtype, "separate_masters": separate}
    dense, spread = updated(make_state(**kind)), updated(make_state(**kind, parts=parts, gaps=True))
    for name, expected in dense.tensors.items():
        assert torch.equal(spread.tensors[name], expected), name
    assert torch.equal(moments_of(spread), moments_of(dense))
    assert torch.equal(masters_of(spread), masters_of(dense))
    assert gaps_are_whole(spread)


def test_a_part_may_have_both_what_decays_and_what_does_not(make_state):
    """And others only one of the two."""
    state = make_state(parts=7)
    border = state.layout.decay_elements
    sides = [(part.elements.start < border, part.elements.stop > border) for part in state.parts]
    assert {(True, False), (True, True)} <= set(sides)
    fine = make_state(parts=196)
    assert any(part.elements.start >= border for part in fine.parts)


@pytest.mark.parametrize(
    ("parts", "room", "reserve", "ranks", "fits"),
    [
        (12, 9 * 3 + 16, 16, 1, True),
        (12, 9 * 3 + 15, 16, 1, False),
        (29, 64, 16, 1, False),
        # Those in flight are no part of a step's room.
        (3, 0, 0, 1, True),
        (3, 0, 0, 2, True),
        (4, 2, 0, 1, False),
        # Ranks share the room.
        (4, 3, 0, 1, True),
        (4, 3, 0, 2, False),
        (4, 6, 0, 2, True),
    ],
)
def test_parts_come_ahead_where_there_is_room_for_all(parts, room, reserve, ranks, fits):
    """Parts of 3 GiB."""
    gib = 2**30
    sizes = [3 * gib] * parts
    assert room_for_all(sizes, room * gib, reserve_bytes=reserve * gib, ranks=ranks) is fits
