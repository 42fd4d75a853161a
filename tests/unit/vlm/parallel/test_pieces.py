"""Pieces by which ranks of different degrees are compared."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from common.vlm.loading import empty_model, weight_layout
from common.vlm.parallel.model import config_shape
from common.vlm.parallel.pieces import pieces
from common.vlm.parallel.shards import shards
from common.vlm.parallel.state import take_shard
from common.vlm.tiny import tiny_config
from common.weights.checksums import checksums

DEGREES = (1, 2, 4)
QKV = "model.visual.blocks.0.attn.qkv.weight"
COLUMNS = "model.language_model.layers.0.self_attn.o_proj.weight"
NORM = "model.language_model.norm.weight"


@pytest.fixture(scope="module")
def config():
    return tiny_config(vision_heads=4)


@pytest.fixture(scope="module")
def whole(config):
    model = empty_model(config, dtype=torch.float32)
    return weight_layout(model, train_vision=True, dtype=torch.float32)


@pytest.fixture(scope="module")
def ranks(config, whole):
    shape = config_shape(config)
    return {d: [shards(whole, shape, rank=r, degree=d) for r in range(d)] for d in DEGREES}


@pytest.fixture(scope="module")
def values(whole):
    generator = torch.Generator().manual_seed(0)
    return {one.name: torch.randn(one.shape, generator=generator) for one in whole.entries}


def cut(ranks, values, own, other):
    """Checksums of every rank of a degree, by piece."""
    found = []
    for parts in ranks[own]:
        named = {}
        for name, part in parts.items():
            local = take_shard(values[name], part)
            for piece in pieces(part, [one[name] for one in ranks[other]]):
                assert piece.named(name) not in named
                named[piece.named(name)] = piece.of(local)
            sizes = [one.numel() for key, one in named.items() if key.partition("[")[0] == name]
            assert sum(sizes) == local.numel()
        found.append(checksums(named))
    return found


@pytest.mark.parametrize(("train", "rollout"), list(product(DEGREES, repeat=2)))
def test_both_sides_hold_the_same_pieces_of_the_same_tensor(ranks, values, train, rollout):
    trained, rolled = cut(ranks, values, train, rollout), cut(ranks, values, rollout, train)
    sides = [
        {key: value for rank in side for key, value in rank.items()} for side in (trained, rolled)
    ]
    assert sides[0] == sides[1]
    for side, rank in zip(sides, (trained, rolled), strict=True):
        assert all(side[key] == value for one in rank for key, value in one.items())


def test_a_wrong_element_is_in_one_piece(ranks, values):
    right = cut(ranks, values, 2, 1)
    wrong = {**values, COLUMNS: values[COLUMNS].clone()}
    wrong[COLUMNS][3, 40] += 1
    (rolled,) = cut(ranks, wrong, 1, 2)
    differs = [key for rank in right for key, value in rank.items() if rolled[key] != value]
    assert differs == [f"{COLUMNS}[0:64, 32:64]"]


def test_pieces_are_called_by_their_indices_unless_they_are_whole(ranks):
    def names(name, own, other):
        return [
            piece.named(name)
            for parts in ranks[own]
            for piece in pieces(parts[name], [one[name] for one in ranks[other]])
        ]

    assert names(NORM, 2, 4) == [NORM, NORM]
    assert names(COLUMNS, 1, 1) == [COLUMNS]
    rows = [(0, 16), (32, 48), (64, 80), (16, 32), (48, 64), (80, 96)]
    assert names(QKV, 2, 2) == [f"{QKV}[{start}:{stop}, 0:32]" for start, stop in rows]
