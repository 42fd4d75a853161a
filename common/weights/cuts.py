"""A flat buffer cut into ranges of about the same length. Needs no torch."""

from __future__ import annotations

from itertools import pairwise

from common.weights.layout import ALIGNMENT_ELEMENTS

MIB = 1 << 20


def shares(elements: int, count: int) -> tuple[slice, ...]:
    """So many ranges, in order, that cover so many elements: equally long ones, as far as possible.

    The last one has what is left over, fewer than `count` elements more than the others.
    """
    length = elements // count
    inner = [length * number for number in range(1, count)]
    return tuple(slice(*ends) for ends in pairwise((0, *inner, elements)))


def cuts(elements: int, *, element_bytes: int, part_mib: float) -> tuple[slice, ...]:
    """The fewest ranges, in order, that cover so many elements and take about so much each.

    All but the last are equally long. They begin where entries of a layout may begin; where entries
    or regions end does not matter.

    Args:
        elements: from 0; 0: there is one empty range.
        element_bytes: of all that lies in a range, an element.
        part_mib: of a range, give or take `ALIGNMENT_ELEMENTS`.
    """
    most = max(1, int(part_mib * MIB) // element_bytes)
    count = max(1, -(-elements // most))
    length = -(-elements // (count * ALIGNMENT_ELEMENTS)) * ALIGNMENT_ELEMENTS
    begins = range(0, elements, length) if elements else (0,)
    return tuple(slice(begin, min(begin + length, elements)) for begin in begins)
