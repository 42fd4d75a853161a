"""Plans for published models: what aliases, what it costs, and what the page says of it."""

from __future__ import annotations

import re
from functools import partial

import pytest

from common.errors import InvalidArgument
from common.layouts.model import layout_pair, legal_degrees
from common.layouts.node import node_plan
from common.layouts.plan import plan_sharing
from common.layouts.rows import Cut, following, padded_rows
from common.layouts.sharing import Kind
from common.vlm.published import PUBLISHED
from common.vlm.shape import read_shape
from rollplex.cli.layout_tables import PAIR_DEGREES, pairs_table
from rollplex.plan.weights import parameter_count
from tests.unit.structure.source import ROOT

PAGE = ROOT / "docs" / "weights.md"
SMALL_SHARE = 0.02
"""Of the model's bytes: most that one GPU rebuilds where layouts nest."""


def made(name, train, rollout, **further):
    return plan_sharing(*layout_pair(read_shape(name), train, rollout), element_bytes=2, **further)


def of_layouts(name, train, rollout, train_tp, rollout_tp):
    return made(name, (train, train_tp), (rollout, rollout_tp))


def services(name, train_tp, rollout_tp):
    shape = read_shape(name)
    return node_plan(
        shape,
        train_tp=train_tp,
        rollout_tp=rollout_tp,
        element_bytes=2,
        rollout_replicas=max(1, train_tp // rollout_tp),
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_layout_has_every_parameter_once(name):
    shape = read_shape(name)
    train, rollout = layout_pair(shape, ("native", 1), ("sglang", 1))
    for layout in (train, rollout):
        assert sum(one.numel * one.count for one in layout.ranks[0]) == parameter_count(shape)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("train_tp", PAIR_DEGREES)
@pytest.mark.parametrize("rollout_tp", PAIR_DEGREES)
def test_nested_layouts_rebuild_next_to_nothing(name, train_tp, rollout_tp):
    shape = read_shape(name)
    if not {train_tp, rollout_tp} <= set(legal_degrees(shape)):
        with pytest.raises(InvalidArgument, match="legal are 1, 2, 4"):
            made(name, ("native", train_tp), ("sglang", rollout_tp))
        return
    for gpu in made(name, ("native", train_tp), ("sglang", rollout_tp)).gpus:
        assert gpu.rebuild_bytes <= SMALL_SHARE * 2 * parameter_count(shape)
        assert gpu.extra_bytes < gpu.full_second_copy_bytes


def test_equal_degrees_alias_everything():
    plan = made("qwen2.5-vl-32b", ("native", 4), ("sglang", 4))
    for gpu in plan.gpus:
        assert gpu.alias_bytes == gpu.full_second_copy_bytes == gpu.train_bytes
        assert gpu.extra_bytes == gpu.gather_bytes == gpu.rebuild_bytes == gpu.scratch_bytes == 0


def test_a_wider_rollout_gathers_what_the_gpu_lacks():
    plan = made("qwen2.5-vl-32b", ("native", 8), ("sglang", 4))
    for gpu in plan.gpus:
        assert gpu.alias_bytes + gpu.gather_bytes == gpu.full_second_copy_bytes
        assert gpu.extra_bytes == gpu.gather_bytes == gpu.full_second_copy_bytes - gpu.train_bytes
        # the widest row-parallel matrix of a layer, whole
        assert gpu.scratch_bytes == 2 * 5120 * 27648 // 4


def test_the_best_order_of_ranks_aliases_twice_as_much():
    plan = made("qwen2.5-vl-32b", ("native", 4), ("native", 2))
    alias = sum(gpu.alias_bytes for gpu in plan.gpus)
    assert [gpu.rollout_rank for gpu in plan.gpus] == [0, 0, 1, 1]
    assert sorted((gpu.rollout_replica, gpu.rollout_rank) for gpu in plan.gpus) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert alias / plan.plain_alias_bytes == pytest.approx(2, rel=0.01)


def test_replicas_of_a_training_rank_have_one_buffer():
    for pair in ((1, 4), (2, 4), (2, 8)):
        plan = made("qwen2.5-vl-3b", ("native", pair[0]), ("sglang", pair[1]), gpus=16)
        buffers = {}
        for gpu in plan.gpus:
            buffer = [(one.storage_elements, one.train_views) for one in gpu.clusters]
            assert buffers.setdefault(gpu.train_rank, buffer) == buffer


def test_a_megatron_matrix_is_plain_and_shares_at_equal_degrees_only():
    for degree, kind in ((2, Kind.ALIAS), (4, Kind.REBUILD), (1, Kind.REBUILD)):
        plan = made("qwen2.5-vl-32b", ("megatron", 2), ("sglang", degree))
        for gpu in plan.gpus:
            for cluster in gpu.clusters:
                assert all(view.blocks == 0 for view in cluster.train_views)
                for one in cluster.rollout:
                    if one.tensor.name.endswith("language_model.layers.*.mlp.gate_up_proj.weight"):
                        assert one.kind is kind


def test_repeated_key_value_heads_are_on_the_ranks_of_their_queries():
    assert [Cut(rank, 8).heads(2, 10) for rank in (0, 3, 4, 7)] == [
        (0, 10),
        (0, 10),
        (10, 20),
        (10, 20),
    ]


def test_an_unpadded_cut_nests_in_a_padded_one():
    rollout = padded_rows(151936, 4, 64)
    assert rollout[3] == (114048, 152064)
    assert following(rollout, 151936, 2) == ((0, 76032), (76032, 151936))
    narrow = following(rollout, 151936, 8)
    assert narrow[-1] == (133056, 151936)
    assert all(rollout[rank // 2][0] <= start for rank, (start, _) in enumerate(narrow))


@pytest.mark.parametrize(
    ("title", "name", "layouts"),
    [
        ("Qwen2.5-VL-3B, `native` and `sglang`", "qwen2.5-vl-3b", ("native", "sglang")),
        ("Qwen2.5-VL-32B, `native` and `sglang`", "qwen2.5-vl-32b", ("native", "sglang")),
        ("Qwen2.5-VL-32B, `megatron` and `sglang`", "qwen2.5-vl-32b", ("megatron", "sglang")),
        ("Qwen2.5-VL-3B, in the services", "qwen2.5-vl-3b", None),
    ],
)
def test_the_page_has_the_tables_of_the_code(title, name, layouts):
    _, _, after = PAGE.read_text(encoding="utf-8").partition(f"### {title}\n")
    table = re.findall(r"^\|.*$", after.partition("\n#")[0], re.MULTILINE)
    if layouts is None:
        expected = pairs_table(read_shape(name), partial(services, name), plain_order=False)
    else:
        expected = pairs_table(read_shape(name), partial(of_layouts, name, *layouts))
    assert "\n".join(table) == expected
