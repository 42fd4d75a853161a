"""Weights in storages with and without gaps, by name and in ranges of their flat order."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.layouts.node import node_plan, training_sharing
from common.weights.binding import views
from common.weights.errors import LayoutMismatch, MissingWeight
from common.weights.layout import TensorSpec, WeightLayout
from common.weights.placed import PlacedRange, placed
from common.weights.places import WeightPlaces
from tests.unit.weights.test_direct import models, tiny_shape

FOREIGN = -1.0


def layout_of(tensors, *, trains=lambda name: "visual" not in name):
    """Of a rank's tensors, what trains first."""
    specs, aliases = [], {}
    for one in tensors:
        for layer in range(one.count):
            name, *others = one.layer_names(layer)
            trainable = trains(name)
            decay = trainable and len(one.shape) > 1
            specs.append(TensorSpec(name=name, shape=one.shape, trainable=trainable, decay=decay))
            aliases |= dict.fromkeys(others, name)
    return WeightLayout.build(specs, dtype="float32", aliases=aliases)


class Rank:
    """A rank of training: its weights in order, and a storage of them that is all foreign."""

    def __init__(self, shape, train_tp, rollout_tp, rank=0):
        plan = node_plan(shape, train_tp=train_tp, rollout_tp=rollout_tp, element_bytes=4)
        self.sharing = training_sharing(plan, rank)
        self.layout = layout_of(plan.train.ranks[rank])
        self.places = WeightPlaces.planned(self.layout, self.sharing)
        self.storage = torch.full((self.places.elements,), FOREIGN)
        self.numbers = torch.arange(1.0, self.layout.total_elements + 1)

    def numbered(self):
        """The numbers of the flat order by name."""
        return views(self.numbers, self.layout)

    @property
    def foreign(self):
        return int((self.storage == FOREIGN).sum())


@st.composite
def ranks(draw):
    model = draw(models())
    return Rank(*model, rank=draw(st.integers(0, model[1] - 1)))


@settings(max_examples=40, deadline=None)
@given(ranks())
def test_weights_written_by_name_are_read_by_name_and_leave_the_gaps(rank):
    tensors = placed(rank.storage, rank.places)
    for name, values in rank.numbered().items():
        tensors[name].copy_(values)
    for name, values in rank.numbered().items():
        assert torch.equal(tensors[name], values), name
    held = sum(entry.numel for entry in rank.layout.entries)
    assert rank.foreign == rank.places.elements - held
    assert rank.foreign * 4 >= rank.sharing.gap_bytes
    assert rank.places.gaps == (rank.sharing.gap_bytes > 0)


@settings(max_examples=40, deadline=None)
@given(ranks(), st.data())
def test_ranges_cut_anywhere_write_and_read_what_names_read(rank, data):
    total = rank.layout.total_elements
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=6))})
    for start, stop in pairwise(cuts):
        one = PlacedRange(rank.storage, rank.places, slice(start, stop))
        one.copy_(rank.numbers[start:stop].double())
        if one.whole is not None:
            assert torch.equal(one.whole, rank.numbers[start:stop])
    tensors = placed(rank.storage, rank.places)
    read = torch.zeros(total)
    PlacedRange(rank.storage, rank.places, slice(0, total)).copy_to(read)
    for name, values in rank.numbered().items():
        assert torch.equal(tensors[name], values), name
        assert torch.equal(views(read, rank.layout, [name])[name], values), name
    assert rank.foreign * 4 >= rank.sharing.gap_bytes


@pytest.mark.parametrize("degrees", [(1, 1), (2, 2), (1, 2), (2, 4)])
def test_without_gaps_a_range_is_one_slice_of_the_layouts_own_order(degrees):
    rank = Rank(tiny_shape(), *degrees)
    assert rank.places == WeightPlaces.dense(rank.layout)
    part = PlacedRange(rank.storage, rank.places, slice(5, 1000))
    assert part.whole.data_ptr() == rank.storage[5:].data_ptr()
    assert part.whole.shape == (995,)


def test_a_matrix_with_gaps_between_its_rows_is_cut_at_parts_of_rows_only():
    rank = Rank(tiny_shape(), 2, 1)
    (entry,) = rank.layout.select(
        ["model.language_model.layers.0.self_attn.o_proj.weight"]
    ).values()
    start, width = entry.offset_elements, entry.shape[1]
    assert rank.places.views[entry.name].strides == (2 * width, 1)
    pieces = list(rank.places.pieces(slice(start + 5, start + 3 * width + 7)))
    assert [one.view.shape for one in pieces] == [(width - 5,), (2, width), (7,)]
    whole = list(rank.places.pieces(slice(start, start + entry.numel)))
    assert [one.view.shape for one in whole] == [entry.shape]


def test_tensors_that_follow_each_other_are_one_piece():
    rank = Rank(tiny_shape(), 2, 1)
    norms = [
        f"model.language_model.layers.{layer}.{norm}.weight"
        for layer in range(2)
        for norm in ("input_layernorm", "post_attention_layernorm")
    ]
    entries = list(rank.layout.select(norms).values())
    first = min(entry.offset_elements for entry in entries)
    last = max(entry.offset_elements + entry.numel for entry in entries)
    assert last - first == sum(entry.numel for entry in entries)
    (piece,) = rank.places.pieces(slice(first, last))
    assert piece.view.shape == (last - first,)


def test_a_gap_that_is_no_longer_than_padding_is_not_written():
    """A bias of 4 elements with room for 8: with and without the gap, the next one is at 16."""
    rank = Rank(tiny_shape(head_width=4), 2, 1)
    name = "model.language_model.layers.0.self_attn.k_proj.bias"
    (entry,) = rank.layout.select([name]).values()
    assert entry.numel == 4
    whole = PlacedRange(rank.storage, rank.places, slice(0, rank.layout.total_elements))
    whole.copy_(rank.numbers)
    first = rank.places.views[name].offset
    assert rank.storage[first + 4 : first + 8].tolist() == [FOREIGN] * 4


def test_what_does_not_fit_is_named():
    rank = Rank(tiny_shape(), 2, 1)
    specs = [TensorSpec(name="other.weight", shape=(4, 4), trainable=False, decay=False)]
    with pytest.raises(MissingWeight, match=r"the plan has no weight for: other\.weight"):
        WeightPlaces.planned(WeightLayout.build(specs, dtype="float32"), rank.sharing)
    name = "model.language_model.norm.weight"
    specs = [TensorSpec(name=name, shape=(4, 4), trainable=False, decay=False)]
    with pytest.raises(LayoutMismatch, match=name):
        WeightPlaces.planned(WeightLayout.build(specs, dtype="float32"), rank.sharing)
    with pytest.raises(LayoutMismatch, match=f"places of {rank.places.elements} elements"):
        placed(torch.zeros(3), rank.places)
