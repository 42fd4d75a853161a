from __future__ import annotations

import math

import pytest
import torch

from common.layouts.box import minus_all
from common.vlm.bound import bound_model
from common.vlm.checkpoint import load_checkpoint, save_checkpoint
from common.vlm.errors import DegreeInvalid
from common.vlm.loading import empty_model, weight_layout
from common.vlm.parallel.model import config_shape
from common.vlm.parallel.shards import (
    check_degree,
    legal_degrees,
    local_kv_heads,
    rank_layout,
    shards,
)
from common.vlm.parallel.state import put_shard, take_shard
from common.vlm.shape import read_shape
from common.vlm.tiny import tiny_config
from common.weights.binding import views
from common.weights.errors import LayoutMismatch

DEGREES = (1, 2, 4)
TOWERS = {"tower split at 4": 4, "tower whole at 4": 2}


@pytest.fixture(params=TOWERS.values(), ids=TOWERS.keys(), scope="module")
def config(request):
    return tiny_config(vision_heads=request.param, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def whole(config):
    return weight_layout(
        empty_model(config, dtype=torch.float32), train_vision=True, dtype=torch.float32
    )


def all_parts(config, whole, degree):
    shape = config_shape(config)
    return [shards(whole, shape, rank=rank, degree=degree) for rank in range(degree)]


@pytest.mark.parametrize("degree", DEGREES)
def test_distinct_parts_cover_every_element_once(config, whole, degree):
    parts = all_parts(config, whole, degree)
    for entry in whole.entries:
        first = {part.holders[0]: part for part in (rank[entry.name] for rank in parts)}
        boxes = [box for part in first.values() for box in part.boxes]
        assert sum(box.numel for box in boxes) == entry.numel
        assert minus_all([type(boxes[0]).whole(entry.shape)], boxes) == []
        for rank, one in enumerate(parts):
            part = one[entry.name]
            assert rank in part.holders
            assert all(parts[other][entry.name] == part for other in part.holders)


@pytest.mark.parametrize("degree", DEGREES)
def test_a_rank_has_about_its_share_of_the_matrices(config, whole, degree):
    for rank, parts in enumerate(all_parts(config, whole, degree)):
        layout = rank_layout(whole, parts, rank=rank, degree=degree)
        assert (layout.rank, layout.world, layout.aliases) == (rank, degree, whole.aliases)
        for entry, full in zip(layout.entries, whole.entries, strict=True):
            assert (entry.name, entry.decay) == (full.name, full.decay)
            copies = len(parts[entry.name].holders)
            assert entry.numel * degree == full.numel * copies
            assert copies in {1, degree, max(1, degree // 2)}


def test_ranks_share_a_head_only_where_there_are_fewer_heads_than_ranks(config, whole):
    name = "model.language_model.layers.0.self_attn.k_proj.weight"
    holders = [[one[name].holders for one in all_parts(config, whole, d)] for d in DEGREES]
    assert holders == [[(0,)], [(0,), (1,)], [(0, 1), (0, 1), (2, 3), (2, 3)]]


def test_fused_projections_are_split_inside_each_third(whole, config):
    name = "model.visual.blocks.0.attn.qkv.weight"
    parts = [one[name] for one in all_parts(config, whole, 2)]
    assert [[box.ranges[0] for box in part.boxes] for part in parts] == [
        [(0, 16), (32, 48), (64, 80)],
        [(16, 32), (48, 64), (80, 96)],
    ]
    values = torch.arange(math.prod(parts[0].whole)).view(parts[0].whole)
    rebuilt = torch.full_like(values, -1)
    for part in parts:
        put_shard(rebuilt, part, take_shard(values, part))
    assert torch.equal(rebuilt, values)


def test_only_the_bias_of_a_row_parallel_projection_is_whole(whole):
    config = tiny_config(vision_heads=4)
    (parts, *_) = all_parts(config, whole, 4)
    biases = {
        name.removeprefix("model.visual.blocks.0."): len(part.holders)
        for name, part in parts.items()
        if name.startswith("model.visual.blocks.0.") and name.endswith(".bias")
    }
    assert biases == {
        "attn.qkv.bias": 1,
        "attn.proj.bias": 4,
        "mlp.gate_proj.bias": 1,
        "mlp.up_proj.bias": 1,
        "mlp.down_proj.bias": 4,
    }


@pytest.mark.parametrize(
    ("model", "legal", "kv_heads"),
    [
        ("qwen2.5-vl-3b", {1, 2, 4, 8, 16}, [2, 1, 1, 1]),
        ("qwen2.5-vl-7b", {1, 2, 4}, [4, 2, 1]),
        ("qwen2.5-vl-32b", {1, 2, 4, 8}, [8, 4, 2, 1]),
    ],
)
def test_legal_degrees_of_published_models(model, legal, kv_heads):
    shape = read_shape(model)
    assert set(legal_degrees(shape)) == legal
    assert [local_kv_heads(shape, 2**n) for n in range(len(kv_heads))] == kv_heads


def test_a_degree_that_does_not_divide_is_refused_with_the_legal_ones():
    with pytest.raises(DegreeInvalid, match=r"degree = 3 does not divide .* legal are 1, 2, 4$"):
        check_degree(config_shape(tiny_config()), 3)


def test_only_the_ranks_slices_of_a_checkpoint_are_loaded(tmp_path, config):
    bound = bound_model(config, dtype=torch.float32, train_vision=True)
    expected = views(bound.weights, bound.layout)
    save_checkpoint(tmp_path, config, bound.layout, expected, max_shard_bytes=50_000)
    for rank, parts in enumerate(all_parts(config, bound.layout, 4)):
        layout = rank_layout(bound.layout, parts, rank=rank, degree=4)
        tensors = views(torch.full((layout.total_elements,), float("nan")), layout)
        load_checkpoint(tmp_path, layout, tensors, shards=parts)
        for name, view in tensors.items():
            assert torch.equal(view, take_shard(expected[name], parts[name])), name


def test_a_checkpoint_of_another_model_is_refused(tmp_path, config, whole):
    other = tiny_config(vocab_size=400, tie_word_embeddings=True)
    bound = bound_model(other, dtype=torch.float32, train_vision=True)
    save_checkpoint(tmp_path, other, bound.layout, views(bound.weights, bound.layout))
    (parts, *_) = all_parts(config, whole, 2)
    layout = rank_layout(whole, parts, rank=0, degree=2)
    tensors = views(torch.zeros(layout.total_elements), layout)
    with pytest.raises(LayoutMismatch, match=r"embed_tokens.weight has shape \(400, 64\)"):
        load_checkpoint(tmp_path, layout, tensors, shards=parts)
