"""Ranges of a flat buffer."""

from __future__ import annotations

from itertools import pairwise

import pytest

from common.weights.cuts import cuts, shares
from common.weights.layout import ALIGNMENT_ELEMENTS

KIB = 1 / 1024


@pytest.mark.parametrize("elements", [0, 1, 16, 100, 97_664, 1_000_003])
@pytest.mark.parametrize("part_mib", [KIB / 64, KIB, 3 * KIB, 1.0, 1e9])
def test_ranges_cover_all_once_in_order(elements: int, part_mib: float) -> None:
    ranges = cuts(elements, element_bytes=12, part_mib=part_mib)
    assert (ranges[0].start, ranges[-1].stop) == (0, elements)
    for before, after in pairwise(ranges):
        assert before.stop == after.start
        assert after.start % ALIGNMENT_ELEMENTS == 0
        assert before.stop - before.start == ranges[0].stop >= after.stop - after.start
    most = part_mib * 2**20 / 12 + ALIGNMENT_ELEMENTS
    assert all(part.stop - part.start <= most for part in ranges)
    assert len(ranges) == 1 or all(part.start < part.stop for part in ranges)


@pytest.mark.parametrize("elements", [5, 16, 97_664, 1_000_003])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shares_cover_all_once_and_are_equal_but_for_the_rest(elements: int, count: int) -> None:
    ranges = shares(elements, count)
    assert (ranges[0].start, ranges[-1].stop, len(ranges)) == (0, elements, count)
    assert all(before.stop == after.start for before, after in pairwise(ranges))
    lengths = [part.stop - part.start for part in ranges]
    assert set(lengths[:-1]) <= {elements // count}
    assert lengths[-1] - elements // count in range(count)


def test_the_3b_shape_has_twelve_parts() -> None:
    trainable = 3_085_938_688
    assert len(cuts(trainable, element_bytes=12, part_mib=3072.0)) == 12
