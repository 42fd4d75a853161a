"""Plans carried out by threads: every rank has the shards that are cut from whole tensors."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from math import lcm

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidArgument
from common.layouts.model import layout_pair
from common.layouts.plan import plan_sharing
from common.vlm.shape import shape_of
from common.vlm.tiny import tiny_config
from common.weights.errors import LayoutMismatch, MissingWeight
from common.weights.resharding.buffers import allocate_sources
from common.weights.resharding.executor import Resharding
from tests.unit.layouts.strategies import free_layouts, pairs
from tests.unit.weights.models import BITS, Member, two_updates, whole_tensors
from tests.unit.weights.ranks import Ranks

SIZES = (1, 2, 3, 4, 6, 8, 12)
"""Least common multiples of any two degrees up to 4, and twice 4."""


@pytest.fixture(scope="module")
def ranks():
    made = Ranks(*SIZES)
    yield made
    made.close()


def tiny_shape(**changes):
    return replace(shape_of(tiny_config().to_dict(), name="tiny"), **changes)


def plan_of(shape, train, rollout, *, dtype=torch.float32, blocks=1, shared=True):
    return plan_sharing(
        *layout_pair(shape, train, rollout),
        element_bytes=dtype.itemsize,
        gpus=blocks * lcm(train[1], rollout[1]),
        shared=shared,
    )


def carry_out(ranks, plan, dtype, **options):
    """What each rank's last update says."""
    wholes = [whole_tensors(plan.train, dtype, seed) for seed in (1, 2)]
    return ranks.run(
        len(plan.gpus), lambda group: two_updates(Member(plan, group, dtype, **options), wholes)
    )


@settings(max_examples=30, deadline=None)
@given(
    pair=pairs(layers=2, most_ranks=4),
    dtype=st.sampled_from(list(BITS)),
    round_bytes=st.sampled_from([1, 4096, 1 << 30]),
    shared=st.booleans(),
)
def test_every_rank_has_the_shards_of_a_random_model(ranks, pair, dtype, round_bytes, shared):
    carry_out(ranks, plan_of(*pair, dtype=dtype, shared=shared), dtype, round_bytes=round_bytes)


@settings(max_examples=40, deadline=None)
@given(layouts=free_layouts())
def test_any_two_layouts_can_be_carried_out(ranks, layouts):
    plan = plan_sharing(*layouts, element_bytes=4)
    carry_out(ranks, plan, torch.float32)


@pytest.mark.parametrize("rollout", [("sglang", 1), ("native", 2), ("sglang", 4)])
@pytest.mark.parametrize("train", [("native", 1), ("megatron", 2), ("native", 4)])
@pytest.mark.parametrize("tied", [True, False])
def test_more_ranks_than_key_value_heads_and_an_uneven_vocabulary(ranks, train, rollout, tied):
    shape = tiny_shape(heads=4, kv_heads=2, vocabulary=1493, tied=tied, layers=3)
    plan = plan_of(shape, train, rollout, dtype=torch.bfloat16, blocks=2)
    carry_out(ranks, plan, torch.bfloat16)


def test_a_training_replica_carries_out_its_part_of_a_larger_plan(ranks):
    plan = plan_of(tiny_shape(), ("native", 2), ("sglang", 1), blocks=3)
    whole = whole_tensors(plan.train, torch.float32, 5)

    def work(group):
        member = Member(plan, group, torch.float32, gpus=[3, 2])
        return two_updates(member, [whole]), member.gpu

    done = ranks.run(2, work)
    assert [gpu.gpu for _, gpu in done] == [3, 2]
    assert all(one.gather_bytes > 0 for one, _ in done)


def test_rows_of_all_ranks_are_gathered_in_one_call_for_all_layers(ranks):
    shape = tiny_shape(layers=4, vocabulary=1536)
    plan = plan_of(shape, ("native", 4), ("sglang", 1), dtype=torch.bfloat16)
    for done in carry_out(ranks, plan, torch.bfloat16):
        # one for what lies in rows, one for what is cut along columns
        assert done.collectives == 2
        assert done.gather_bytes > done.alias_bytes > 0


def test_what_only_aliases_calls_nothing(ranks):
    for done in carry_out(
        ranks, plan_of(tiny_shape(), ("native", 1), ("sglang", 2)), torch.float32
    ):
        assert (done.gather_bytes, done.rebuild_bytes, done.collectives) == (0, 0, 0)


def test_absent_tensors_are_named(ranks):
    plan = plan_of(tiny_shape(tied=True), ("native", 1), ("sglang", 1))

    def work(group):
        sources = allocate_sources(plan.gpus[0], dtype=torch.float32, device=torch.device("cpu"))
        Resharding(plan, sources, group)
        # a second name of a tied tensor is enough
        del sources["model.language_model.embed_tokens.weight"]
        Resharding(plan, sources, group)
        gone = [
            "model.language_model.layers.1.mlp.up_proj.weight",
            "model.visual.merger.ln_q.weight",
        ]
        for name in gone:
            del sources[name]
        with pytest.raises(MissingWeight) as raised:
            Resharding(plan, sources, group)
        assert sorted(raised.value.data["names"]) == gone
        assert all(name in str(raised.value) for name in gone)

    ranks.run(1, work)


def test_tensors_that_do_not_lie_as_planned_are_refused(ranks):
    plan = plan_of(tiny_shape(), ("native", 1), ("sglang", 2), blocks=1)
    name = "model.language_model.layers.0.mlp.up_proj.weight"

    def refused(group, wrong, text):
        device = torch.device("cpu")
        sources = allocate_sources(plan.gpus[group.rank()], dtype=torch.float32, device=device)
        sources[name] = wrong(sources[name])
        with pytest.raises(LayoutMismatch, match=text):
            Resharding(plan, sources, group)

    for wrong, text in (
        (torch.clone, name),
        (lambda one: one.flatten(0, 1), name),
        (lambda one: one.double(), "float64"),
    ):
        ranks.run(2, lambda group, wrong=wrong, text=text: refused(group, wrong, text))
    narrow = plan_of(tiny_shape(), ("native", 1), ("sglang", 1), dtype=torch.bfloat16)

    def other_width(group):
        sources = allocate_sources(narrow.gpus[0], dtype=torch.float32, device=torch.device("cpu"))
        with pytest.raises(LayoutMismatch, match="4 bytes an element"):
            Resharding(narrow, sources, group)

    ranks.run(1, other_width)


def test_a_group_that_does_not_fit_the_plan_is_refused(ranks):
    plan = plan_of(tiny_shape(), ("native", 2), ("sglang", 1), blocks=2)

    def work(group):
        with pytest.raises(InvalidArgument, match=r"4 GPUs .* 2 ranks"):
            Member(plan, group, torch.float32)
        with pytest.raises(InvalidArgument, match=r"no rank for GPUs \[0, 3\]"):
            Member(plan, group, torch.float32, gpus=[1, 2])

    ranks.run(2, work)


def test_an_update_that_fails_does_not_raise_the_version():
    plan = plan_of(tiny_shape(), ("native", 2), ("sglang", 1))

    def work(group):
        member = Member(plan, group, torch.float32)
        if group.rank() == 0:
            with pytest.raises(RuntimeError):
                member.resharding.update()
        return member.resharding.version

    ranks = Ranks(2, timeout=timedelta(milliseconds=300))
    try:
        assert ranks.run(2, work) == [0, 0]
    finally:
        ranks.close()
