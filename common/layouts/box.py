"""Index boxes of a tensor: one half-open range an axis. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Box:
    """The indices ``start <= i < stop`` of each axis.

    Attributes:
        ranges: start and stop of every axis.
    """

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All indices of a tensor."""
        return cls(tuple((0, size) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Indices of each axis."""
        return tuple(stop - start for start, stop in self.ranges)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """What both have; None if that is nothing."""
        both = tuple(
            (max(a, c), min(b, d)) for (a, b), (c, d) in zip(self.ranges, other.ranges, strict=True)
        )
        return Box(both) if all(start < stop for start, stop in both) else None

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` is in this box."""
        return all(
            a <= c and d <= b for (a, b), (c, d) in zip(self.ranges, other.ranges, strict=True)
        )

    def hull(self, other: Box) -> Box:
        """The smallest box with both."""
        return Box(
            tuple(
                (min(a, c), max(b, d))
                for (a, b), (c, d) in zip(self.ranges, other.ranges, strict=True)
            )
        )

    def minus(self, other: Box) -> list[Box]:
        """Disjoint boxes that together are this one without `other`."""
        common = self.intersect(other)
        if common is None:
            return [self]
        rest: list[Box] = []
        ranges = list(self.ranges)
        for axis, (start, stop) in enumerate(common.ranges):
            first, last = ranges[axis]
            rest += [
                Box((*ranges[:axis], cut, *ranges[axis + 1 :]))
                for cut in ((first, start), (stop, last))
                if cut[0] < cut[1]
            ]
            ranges[axis] = (start, stop)
        return rest


def minus_all(boxes: Iterable[Box], taken: Iterable[Box]) -> list[Box]:
    """What is left of disjoint boxes without those of `taken`."""
    rest = list(boxes)
    for one in taken:
        rest = [piece for box in rest for piece in box.minus(one)]
    return rest
