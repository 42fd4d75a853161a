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
from common.layouts.node import node_plan, rollout_sharing, source_ranks
from common.layouts.sharing import Kind
from common.vlm.shape import shape_of
from common.vlm.tiny import tiny_config
from common.weights.errors import MissingWeight
from common.weights.resharding.buffers import own_elements
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


def trained(rank, whole):
    """A training rank's tensors by name, in one flat buffer without a gap."""
    tensors = named(rank)
    flat = torch.cat([shard(one, layer, whole).flatten() for one, layer, _ in tensors])
    parts = flat.split([one.numel for one, _, _ in tensors])
    return {
        name: part.view(one.shape)
        for (one, _, names), part in zip(tensors, parts, strict=True)
        for name in names
    }


def tiny_shape(**changes):
    return replace(shape_of(tiny_config().to_dict(), name="tiny"), **changes)


class Node:
    """All ranks of training, and one of the rollout."""

    def __init__(self, shape, train_tp, rollout_tp, rank, dtype=torch.float32):
        size = dtype.itemsize
        self.plan = node_plan(shape, train_tp=train_tp, rollout_tp=rollout_tp, element_bytes=size)
        self.sharing = rollout_sharing(self.plan, rank)
        self.dtype, self.rank = dtype, rank
        self.whole = whole_tensors(self.plan.train, dtype, 1)
        self.sources = {
            one: trained(self.plan.train.ranks[one], self.whole)
            for one in source_ranks(self.sharing)
        }
        self.own = torch.zeros(own_elements(self.sharing), dtype=dtype)
        self.resharding = DirectResharding(self.plan, self.sharing, self.sources, self.own)

    def train(self, seed):
        self.whole = whole_tensors(self.plan.train, self.dtype, seed)
        for rank, tensors in self.sources.items():
            for name, values in trained(self.plan.train.ranks[rank], self.whole).items():
                tensors[name].copy_(values)

    def wrong(self):
        return [
            name
            for one, layer, names in named(self.plan.rollout.ranks[self.rank])
            for name in names
            if not equal(self.resharding.targets[name], one, layer, self.whole)
        ]

    def harmed(self):
        """Tensors of training that are not what training wrote."""
        return [
            name
            for rank, tensors in self.sources.items()
            for one, layer, names in named(self.plan.train.ranks[rank])
            for name in names
            if not equal(tensors[name], one, layer, self.whole)
        ]


@settings(max_examples=25, deadline=None)
@given(model=models(), dtype=st.sampled_from(list(BITS)))
def test_every_rank_has_its_shards_after_each_update(model, dtype):
    shape, train_tp, rollout_tp = model
    for rank in range(rollout_tp):
        node = Node(shape, train_tp, rollout_tp, rank, dtype)
        addresses = {name: one.data_ptr() for name, one in node.resharding.targets.items()}
        for version in (1, 2):
            node.train(version)
            done = node.resharding.update(WeightsVersion(version))
            assert node.wrong() == node.harmed() == []
            assert (done.version, done.alias_bytes, done.gather_bytes, done.rebuild_bytes) == (
                version,
                node.sharing.alias_bytes,
                0,
                node.sharing.rebuild_copied_bytes,
            )
        assert addresses == {name: one.data_ptr() for name, one in node.resharding.targets.items()}


@settings(max_examples=15, deadline=None)
@given(model=models())
def test_an_alias_is_the_memory_of_training_and_what_is_rebuilt_is_the_ranks_own(model):
    shape, train_tp, rollout_tp = model
    node = Node(shape, train_tp, rollout_tp, rollout_tp - 1)
    theirs = next(iter(node.sources[node.sharing.train_rank].values())).untyped_storage()
    for cluster in node.sharing.clusters:
        for shared in cluster.rollout:
            assert shared.kind is not Kind.GATHER
            memory = node.resharding.targets[shared.tensor.layer_names(0)[0]].untyped_storage()
            expected = theirs if shared.kind is Kind.ALIAS else node.own.untyped_storage()
            assert memory.data_ptr() == expected.data_ptr()


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
    node = Node(tiny_shape(), 2, 1, 0)
    names = [
        "model.language_model.layers.1.mlp.up_proj.weight",
        "model.visual.merger.ln_q.weight",
    ]
    for name in names:
        del node.sources[1][name]
    with pytest.raises(MissingWeight) as raised:
        DirectResharding(node.plan, node.sharing, node.sources, node.own)
    assert sorted(raised.value.data["names"]) == names


def test_a_degree_that_splits_nothing_is_refused():
    with pytest.raises(InvalidArgument, match="rollout_tp = 3"):
        node_plan(tiny_shape(), train_tp=2, rollout_tp=3, element_bytes=4)
