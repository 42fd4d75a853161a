"""Plans for random models, carried out: the rollout reads its shards, training keeps its own."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.layouts.box import Box
from common.layouts.kinds import ROLLOUT_LAYOUTS, TRAIN_LAYOUTS
from common.layouts.model import layout_pair, legal_degrees
from common.layouts.plan import plan_sharing
from common.layouts.tensors import Layout, LogicalTensor, Part, RankTensor
from common.vlm.shape import MODEL_TYPES, QWEN3, ModelShape, VisionShape
from tests.unit.layouts.memory import carry_out, logical_values, shard


@st.composite
def shapes(draw):
    model_type = draw(st.sampled_from(MODEL_TYPES))
    newer = model_type == QWEN3
    heads, kv_heads = draw(st.sampled_from([(4, 2), (8, 2), (8, 8), (6, 2), (6, 3), (12, 4)]))
    return ModelShape(
        name="random",
        model_type=model_type,
        vocabulary=draw(st.integers(1430, 1536)),
        width=3,
        inner=24,
        layers=1,
        heads=heads,
        kv_heads=kv_heads,
        head_width=2,
        attention_bias=draw(st.booleans()),
        output_bias=newer,
        head_norms=newer,
        tied=draw(st.booleans()),
        vision=VisionShape(
            depth=1,
            width=8,
            inner=draw(st.sampled_from([8, 10, 24])),
            heads=draw(st.sampled_from([2, 4, 8])),
            patch_elements=2,
            merged_patches=2,
            out_width=3,
            deepstack=1 if newer else 0,
            positions=3 if newer else 0,
        ),
    )


@st.composite
def pairs(draw):
    shape = draw(shapes())
    degrees = st.sampled_from([one for one in legal_degrees(shape) if one <= 8])
    train = (draw(st.sampled_from(TRAIN_LAYOUTS)), draw(degrees))
    return shape, train, (draw(st.sampled_from(ROLLOUT_LAYOUTS)), draw(degrees))


@settings(max_examples=25, deadline=None)
@given(pairs(), st.integers(1, 2))
def test_every_rank_reads_its_shards_after_an_update(pair, blocks):
    shape, train, rollout = pair
    layouts = layout_pair(shape, train, rollout)
    plan = plan_sharing(*layouts, element_bytes=2)
    if blocks == 2:
        plan = plan_sharing(*layouts, element_bytes=2, gpus=2 * len(plan.gpus))
    values = logical_values(layouts[0])
    carry_out(plan, values)
    ranks = [gpu.rollout_replica * rollout[1] + gpu.rollout_rank for gpu in plan.gpus]
    assert sorted(ranks) == list(range(len(plan.gpus)))


@settings(max_examples=25, deadline=None)
@given(pairs())
def test_all_ranks_together_hold_the_model(pair):
    shape, train, rollout = pair
    for layout in layout_pair(shape, train, rollout):
        values = logical_values(layout)
        held = [shard(one, values) for rank in layout.ranks for one in rank]
        assert {int(x) for one in held for x in one.flat} - {0} == {
            int(x) for one in values.values() for x in one.flat
        }


@st.composite
def free_layouts(draw):
    """Two layouts of a few matrices: cut anywhere, joined in any order, in as many ranks each."""
    columns = draw(st.integers(1, 3))
    tensors = [
        LogicalTensor(name=name, shape=(draw(st.integers(1, 12)), columns)) for name in "abc"
    ]
    return tuple(draw(layouts_of(tensors)) for _ in range(2))


@st.composite
def layouts_of(draw, tensors):
    degree = draw(st.integers(1, 4))
    order = draw(st.permutations(tensors))
    joined = draw(st.sampled_from([[3], [1, 2], [2, 1], [1, 1, 1]]))
    per_rank = [{} for _ in range(degree)]
    for tensor in tensors:
        rows, columns = tensor.shape
        # every rank has at least one row: some rows may then be on two ranks
        cuts = sorted(
            draw(st.lists(st.integers(0, rows), min_size=degree - 1, max_size=degree - 1))
        )
        for rank, (start, stop) in enumerate(zip([0, *cuts], [*cuts, rows], strict=True)):
            start = min(start, rows - 1)
            box = Box(((start, max(stop, start + 1)), (0, columns)))
            per_rank[rank][tensor.name] = Part(tensor, box)
    ranks = []
    for held in per_rank:
        parts = [held[tensor.name] for tensor in order]
        made = []
        for size in joined:
            group, parts = parts[:size], parts[size:]
            made.append(RankTensor((f"joined{len(made)}",), tuple(group)))
        ranks.append(tuple(made))
    return Layout(name="free", ranks=tuple(ranks), in_blocks=draw(st.booleans()))


@settings(max_examples=150, deadline=None)
@given(free_layouts())
def test_any_two_layouts_can_be_planned(layouts):
    train, rollout = layouts
    carry_out(plan_sharing(train, rollout, element_bytes=4), logical_values(train))


def test_a_head_that_the_buffer_has_twice_is_copied_to_its_second_place():
    tensors = [LogicalTensor(name=name, shape=(rows, 2)) for name, rows in (("q", 8), ("k", 2))]
    whole = tuple(RankTensor((one.name,), (Part(one, Box.whole(one.shape)),)) for one in tensors)
    ranks = [
        RankTensor(
            ("qk",),
            tuple(
                Part(one, Box(((first, first + rows), (0, 2))))
                for one, first, rows in zip(tensors, (2 * rank, rank // 2), (2, 1), strict=True)
            ),
        )
        for rank in range(4)
    ]
    train = Layout(name="separate", ranks=(whole,), in_blocks=True)
    rollout = Layout(name="joined", ranks=tuple((one,) for one in ranks), in_blocks=False)
    plan = plan_sharing(train, rollout, element_bytes=1)
    assert [gpu.gather_bytes for gpu in plan.gpus] == [0, 2, 0, 2]
    assert [gpu.extra_bytes for gpu in plan.gpus] == [4] * 4
    carry_out(plan, logical_values(train))
