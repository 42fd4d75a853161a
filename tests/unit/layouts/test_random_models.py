"""Plans for random models, carried out: the rollout reads its shards, training keeps its own."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.layouts.box import Box
from common.layouts.model import layout_pair
from common.layouts.plan import plan_sharing
from common.layouts.tensors import Layout, LogicalTensor, Part, RankTensor
from tests.unit.layouts.memory import carry_out, logical_values, shard
from tests.unit.layouts.strategies import free_layouts, pairs


@settings(max_examples=25, deadline=None)
@given(pairs(), st.integers(1, 2), st.booleans())
def test_every_rank_reads_its_shards_after_an_update(pair, blocks, shared):
    shape, train, rollout = pair
    layouts = layout_pair(shape, train, rollout)
    plan = plan_sharing(*layouts, element_bytes=2, shared=shared)
    if blocks == 2:
        gpus = 2 * len(plan.gpus)
        plan = plan_sharing(*layouts, element_bytes=2, gpus=gpus, shared=shared)
    if not shared:
        assert all(gpu.extra_bytes == gpu.full_second_copy_bytes for gpu in plan.gpus)
        assert [gpu.rollout_rank for gpu in plan.gpus] == [
            gpu.gpu % rollout[1] for gpu in plan.gpus
        ]
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
