"""Plans of one node carried out by a rank that reads the memory of all ranks of training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidArgument
from common.ids import WeightsVersion
from common.layouts.model import legal_degrees
from common.layouts.node import (
    gatherers,
    node_plan,
    rollout_sharing,
    source_ranks,
    training_sharing,
)
from common.layouts.sharing import Kind
from common.vlm.shape import shape_of
from common.vlm.tiny import tiny_config
from common.weights.errors import MissingWeight
from common.weights.resharding.buffers import own_elements, source_elements, sources_in
from common.weights.resharding.direct import DirectResharding
from tests.unit.layouts.strategies import shapes
from tests.unit.weights.models import BITS, equal, shard, whole_tensors

MOST_RANKS = 4


@st.composite
def models(draw):
    shape = draw(shapes(layers=2))
    degrees = st.sampled_from([one for one in legal_degrees(shape) if one <= MOST_RANKS])
    return shape, draw(degrees), draw(degrees)


def named(tensors):
    """Each tensor of a rank with its layer and names."""
    return [(one, at, one.layer_names(at)) for one in tensors for at in range(one.count)]


def tiny_shape(**changes):
    return replace(shape_of(tiny_config().to_dict(), name="tiny"), **changes)


class Node:
    """All ranks of training, and all of the rollout, as a node has them."""

    def __init__(self, shape, train_tp, rollout_tp, dtype=torch.float32, replicas=1):
        self.plan = node_plan(
            shape,
            train_tp=train_tp,
            rollout_tp=rollout_tp,
            element_bytes=dtype.itemsize,
            rollout_replicas=replicas,
        )
        self.dtype = dtype
        self.flats = []
        for rank in range(train_tp):
            elements = source_elements(training_sharing(self.plan, rank))
            self.flats.append(torch.zeros(elements, dtype=dtype))
        self.sources = [
            sources_in(training_sharing(self.plan, rank), flat)
            for rank, flat in enumerate(self.flats)
        ]
        self.ranks = [
            RolloutRank(self, rollout_sharing(self.plan, rank, replica=replica))
            for replica in range(replicas)
            for rank in range(rollout_tp)
        ]
        self.train(0)

    def train(self, seed):
        self.whole = whole_tensors(self.plan.train, self.dtype, seed)
        for rank, tensors in enumerate(self.sources):
            for one, layer, names in named(self.plan.train.ranks[rank]):
                tensors[names[0]].copy_(shard(one, layer, self.whole))

    def harmed(self):
        """Tensors of training that are not what training wrote."""
        return [
            name
            for rank, tensors in enumerate(self.sources)
            for one, layer, names in named(self.plan.train.ranks[rank])
            for name in names
            if not equal(tensors[name], one, layer, self.whole)
        ]


class RolloutRank:
    def __init__(self, node, sharing):
        self.node, self.sharing = node, sharing
        self.own = torch.zeros(own_elements(sharing), dtype=node.dtype)
        self.sources = {rank: node.sources[rank] for rank in source_ranks(sharing)}
        self.resharding = DirectResharding(node.plan, sharing, self.sources, self.own)

    def wrong(self):
        return [
            name
            for one, layer, names in named(self.node.plan.rollout.ranks[self.sharing.rollout_rank])
            for name in names
            if not equal(self.resharding.targets[name], one, layer, self.node.whole)
        ]


def addresses_of(node):
    return [
        {name: one.data_ptr() for name, one in rank.resharding.targets.items()}
        for rank in node.ranks
    ]


@settings(max_examples=40, deadline=None)
@given(model=models(), dtype=st.sampled_from(list(BITS)), replicas=st.integers(1, 2))
def test_all_ranks_have_their_shards_at_once_after_each_update(model, dtype, replicas):
    node = Node(*model, dtype, replicas)
    addresses = addresses_of(node)
    for version in (1, 2):
        node.train(version)
        for rank in node.ranks:
            done = rank.resharding.update(WeightsVersion(version))
            assert (done.version, done.alias_bytes, done.gather_bytes, done.rebuild_bytes) == (
                version,
                rank.sharing.alias_bytes,
                rank.sharing.gather_bytes,
                rank.sharing.rebuild_copied_bytes,
            )
        assert [rank.wrong() for rank in node.ranks] == [[]] * len(node.ranks)
        assert node.harmed() == []
    assert addresses == addresses_of(node)


@settings(max_examples=20, deadline=None)
@given(model=models(), replicas=st.integers(1, 2))
def test_what_is_rebuilt_is_the_ranks_own_and_all_else_is_memory_of_training(model, replicas):
    node = Node(*model, replicas=replicas)
    for rank in node.ranks:
        theirs = node.flats[rank.sharing.train_rank].untyped_storage()
        for cluster in rank.sharing.clusters:
            for shared in cluster.rollout:
                target = rank.resharding.targets[shared.tensor.layer_names(0)[0]]
                rebuilt = shared.kind is Kind.REBUILD
                expected = rank.own.untyped_storage() if rebuilt else theirs
                assert target.untyped_storage().data_ptr() == expected.data_ptr()


@settings(max_examples=40, deadline=None)
@given(model=models(), replicas=st.integers(1, 4))
def test_memory_of_training_has_gaps_for_one_rank_of_the_rollout_or_for_none(model, replicas):
    shape, train_tp, rollout_tp = model
    plan = node_plan(
        shape, train_tp=train_tp, rollout_tp=rollout_tp, element_bytes=2, rollout_replicas=replicas
    )
    for rank in range(train_tp):
        beside = [one for one in plan.gpus if one.train_rank == rank and one.full_second_copy_bytes]
        gathering = gatherers(plan, rank)
        if gathering:
            (one,) = beside
            assert gathering == (one.rollout_replica * rollout_tp + one.rollout_rank,)
            assert training_sharing(plan, rank).gap_bytes == one.gather_bytes
        else:
            assert training_sharing(plan, rank).gap_bytes == 0


@pytest.mark.parametrize(
    ("train_tp", "rollout_tp", "replicas", "gathering"),
    [
        (2, 1, 1, [(0,), ()]),
        (2, 1, 2, [(0,), (1,)]),
        (4, 2, 2, [(0,), (2,), (1,), (3,)]),
        # One memory for two ranks: what they lack would need two gaps.
        (2, 1, 4, [(), ()]),
        (2, 4, 1, [(), ()]),
        (2, 2, 1, [(), ()]),
    ],
)
def test_who_gathers_into_each_rank_of_training(train_tp, rollout_tp, replicas, gathering):
    plan = node_plan(
        tiny_shape(),
        train_tp=train_tp,
        rollout_tp=rollout_tp,
        element_bytes=4,
        rollout_replicas=replicas,
    )
    assert [gatherers(plan, rank) for rank in range(train_tp)] == gathering


@pytest.mark.parametrize(("train_tp", "rollout_tp"), [(1, 1), (2, 2), (4, 4), (1, 2), (1, 4)])
def test_ranks_of_a_finer_rollout_rebuild_the_towers_joined_projections_alone(train_tp, rollout_tp):
    shape = tiny_shape()
    plan = node_plan(shape, train_tp=train_tp, rollout_tp=rollout_tp, element_bytes=4)
    rebuilt = {
        one.tensor.name
        for gpu in plan.gpus
        for cluster in gpu.clusters
        for one in cluster.rollout
        if one.kind is Kind.REBUILD
    }
    split = train_tp < rollout_tp <= shape.vision.heads
    joined = {f"model.visual.blocks.*.attn.qkv.{leaf}" for leaf in ("weight", "bias")}
    assert rebuilt == (joined if split else set())


def test_absent_tensors_are_named():
    node = Node(tiny_shape(), 2, 1)
    (rank,) = node.ranks
    names = [
        "model.language_model.layers.1.mlp.up_proj.weight",
        "model.visual.merger.ln_q.weight",
    ]
    for name in names:
        del rank.sources[1][name]
    with pytest.raises(MissingWeight) as raised:
        DirectResharding(node.plan, rank.sharing, rank.sources, rank.own)
    assert sorted(raised.value.data["names"]) == names


def test_a_degree_that_splits_nothing_is_refused():
    with pytest.raises(InvalidArgument, match="rollout_tp = 3"):
        node_plan(tiny_shape(), train_tp=2, rollout_tp=3, element_bytes=4)
