"""Boxes, and which tensors are views of a buffer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.layouts.box import Box, minus_all
from common.layouts.storage import Storage, View
from common.layouts.tensors import LogicalTensor, Part, RankTensor, row_box
from common.weights.errors import LayoutInvalid

GATE, UP = (LogicalTensor(name=name, shape=(8, 3)) for name in ("gate", "up"))
DOWN = LogicalTensor(name="down", shape=(3, 8))

ranges = st.tuples(st.integers(0, 5), st.integers(1, 4)).map(lambda one: (one[0], sum(one)))
boxes = st.tuples(ranges, ranges).map(Box)


def elements(box):
    (a, b), (c, d) = box.ranges
    return {(x, y) for x in range(a, b) for y in range(c, d)}


def rows(*pieces):
    return RankTensor(
        ("joined",), tuple(Part(tensor, row_box(start, stop, 3)) for tensor, start, stop in pieces)
    )


@given(boxes, st.lists(boxes, max_size=3))
def test_boxes_are_sets_of_elements(box, others):
    left = minus_all([box], others)
    assert sum(one.numel for one in left) == len(set().union(*map(elements, left)))
    assert set().union(*map(elements, left)) == elements(box).difference(*map(elements, others))
    for other in others:
        both = box.intersect(other)
        assert (elements(both) if both else set()) == elements(box) & elements(other)
        assert box.hull(other).contains(box)
        assert box.hull(other).contains(other)
        assert box.contains(other) is (elements(other) <= elements(box))


def test_gate_and_up_of_every_rank_kept_together():
    ranks = [rows((GATE, start, start + 4), (UP, start, start + 4)) for start in (0, 4)]
    storage = Storage.of(ranks)
    assert storage.view(ranks[1], in_blocks=False) == View(24, (8, 3), (3, 1))
    whole = rows((UP, 0, 8))
    assert storage.view(whole, in_blocks=False) is None
    assert storage.view(whole, in_blocks=True) == View(12, (2, 4, 3), (24, 3, 1), blocks=1)


def test_a_joined_tensor_that_lies_in_blocks_of_blocks():
    storage = Storage.of([rows((GATE, 0, 4), (UP, 0, 4)), rows((GATE, 4, 8), (UP, 4, 8))])
    joined = rows((GATE, 0, 8), (UP, 0, 8))
    view = storage.view(joined, in_blocks=True)
    assert view == View(0, (2, 2, 4, 3), (12, 24, 3, 1), blocks=2)
    assert [view.row_offset(row) for row in (0, 3, 4, 8, 12)] == [0, 9, 24, 12, 36]
    assert not view.contiguous


def test_columns_are_a_strided_view():
    storage = Storage.of([RankTensor(("down",), (Part(DOWN, Box(((0, 3), (0, 8)))),))])
    part = RankTensor(("down",), (Part(DOWN, Box(((0, 3), (4, 8)))),))
    assert storage.view(part, in_blocks=False) == View(4, (3, 4), (8, 1))


@pytest.mark.parametrize(
    "pieces",
    [((UP, 0, 4), (GATE, 0, 4)), ((GATE, 0, 2), (UP, 0, 4)), ((GATE, 0, 9),)],
    ids=["backwards", "uneven", "absent"],
)
def test_no_view(pieces):
    storage = Storage.of([rows((GATE, 0, 4), (UP, 0, 4)), rows((GATE, 4, 8), (UP, 4, 8))])
    assert storage.view(rows(*pieces), in_blocks=True) is None


def test_parts_that_do_not_fit_together():
    with pytest.raises(LayoutInvalid, match="other than the first"):
        RankTensor(("x",), (Part(GATE, row_box(0, 2, 3)), Part(DOWN, row_box(0, 2, 8))))
    with pytest.raises(LayoutInvalid, match="at least one part"):
        RankTensor(("x",), ())
