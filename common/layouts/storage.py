"""Flat memory of a rank, and whether a tensor is a strided view of it. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from common.layouts.box import Box
    from common.layouts.tensors import Part, RankTensor

MOST_BLOCKS = 1024
"""A tensor in more blocks than this is no view that anyone would read."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as strided memory; offset and strides in elements.

    Its elements, read with the last axis fastest, are those of the tensor in the same order.
    Leading axes beyond the tensor's own count blocks of rows.

    Attributes:
        shape: of blocks, then rows of one block, then the other extents.
        blocks: leading axes that count blocks; 0: a plain view.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    blocks: int = 0

    @classmethod
    def plain(cls, shape: tuple[int, ...], *, offset: int = 0) -> View:
        """A tensor whose elements follow each other."""
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return cls(offset, shape, strides)

    @property
    def numel(self) -> int:
        """Number of elements, gaps not counted."""
        return math.prod(self.shape)

    @property
    def block_rows(self) -> int:
        """Rows that lie at one stride."""
        return self.shape[self.blocks]

    @property
    def contiguous(self) -> bool:
        """Whether its elements follow each other without a gap."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def row_offset(self, row: int) -> int:
        """Where a row of the tensor starts."""
        index, inner = divmod(row, self.block_rows)
        offset = self.offset + inner * self.strides[self.blocks]
        for axis in reversed(range(self.blocks)):
            index, place = divmod(index, self.shape[axis])
            offset += place * self.strides[axis]
        return offset

    def runs(self, row: int, stop: int) -> Iterator[tuple[int, int]]:
        """Offset and number of rows of each piece in which the tensor's rows lie at one stride."""
        while row < stop:
            rows = min(stop - row, self.block_rows - row % self.block_rows)
            yield self.row_offset(row), rows
            row += rows


@dataclass(frozen=True, slots=True)
class Placement:
    """A box of a logical tensor that lies at an offset of a storage.

    Attributes:
        home: where the tensor starts that it is a part of.
    """

    tensor: str
    box: Box
    home: int
    offset: int
    strides: tuple[int, ...]

    def offset_of(self, index: Sequence[int]) -> int:
        """Where the element of this logical index lies."""
        return self.offset + sum(
            (at - start) * stride
            for at, (start, _), stride in zip(index, self.box.ranges, self.strides, strict=True)
        )


@dataclass(slots=True)
class Storage:
    """One flat buffer with tensors laid out in it, one after the other.

    A logical element may have several places. The first that was put is the one that is found.
    """

    elements: int = 0
    placements: list[Placement] = field(default_factory=list)
    homes: dict[tuple[Part, ...], View] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Iterable[RankTensor], *, first: Iterable[RankTensor] = ()) -> Storage:
        """A buffer with all `tensors` in their order, equal ones once.

        Args:
            first: those whose places are found before others'.
        """
        storage = cls()
        for tensor in tensors:
            storage._put(tensor)
        ahead = {view.offset for one in first if (view := storage.homes.get(one.parts))}
        storage.placements.sort(key=lambda placement: placement.home not in ahead)
        return storage

    def view(self, tensor: RankTensor, *, in_blocks: bool) -> View | None:
        """The tensor as a view of this buffer; None if it is none.

        Args:
            in_blocks: whether a view may have axes for blocks of rows.
        """
        if (home := self.homes.get(tensor.parts)) is not None:
            return home
        runs: list[tuple[int, int]] = []
        strides: set[tuple[int, ...]] = set()
        for part in tensor.parts:
            found = self._runs(part)
            if found is None:
                return None
            for rows, offset, steps in found:
                runs.append((rows, offset))
                strides.add(steps)
        if len(strides) != 1:
            return None
        return _joined(runs, tensor.shape[1:], strides.pop(), in_blocks=in_blocks)

    def _put(self, tensor: RankTensor) -> None:
        if tensor.parts in self.homes:
            return
        home = self.elements
        view = self.homes[tensor.parts] = View.plain(tensor.shape, offset=home)
        for part in tensor.parts:
            self.placements.append(
                Placement(part.tensor.name, part.box, home, self.elements, view.strides)
            )
            self.elements += part.box.numel

    def _runs(self, part: Part) -> list[tuple[int, int, tuple[int, ...]]] | None:
        """Rows, offset, strides of the pieces in which a part lies here; None if some is absent."""
        (row, stop), *rest = part.box.ranges
        runs: list[tuple[int, int, tuple[int, ...]]] = []
        while row < stop:
            place = next(
                (
                    one
                    for one in self.placements
                    if one.tensor == part.tensor.name
                    and one.box.ranges[0][0] <= row < one.box.ranges[0][1]
                    and all(
                        a <= c and d <= b
                        for (a, b), (c, d) in zip(one.box.ranges[1:], rest, strict=True)
                    )
                ),
                None,
            )
            if place is None:
                return None
            until = min(stop, place.box.ranges[0][1])
            offset = place.offset_of((row, *(start for start, _ in rest)))
            runs.append((until - row, offset, place.strides))
            row = until
        return runs


def _joined(
    runs: list[tuple[int, int]],
    rest: tuple[int, ...],
    strides: tuple[int, ...],
    *,
    in_blocks: bool,
) -> View | None:
    """Runs of rows, each at `strides`, as one view."""
    row_stride = strides[0]
    merged: list[tuple[int, int]] = []
    for rows, offset in runs:
        if merged and merged[-1][1] + merged[-1][0] * row_stride == offset:
            merged[-1] = (merged[-1][0] + rows, merged[-1][1])
        else:
            merged.append((rows, offset))
    if len(merged) == 1:
        return View(merged[0][1], (merged[0][0], *rest), strides)
    size = math.gcd(*(rows for rows, _ in merged))
    if not in_blocks or sum(rows for rows, _ in merged) > size * MOST_BLOCKS:
        return None
    offsets = [
        offset + first * row_stride for rows, offset in merged for first in range(0, rows, size)
    ]
    axes = _lattice(offsets)
    if axes is None:
        return None
    return View(
        offsets[0],
        (*(count for count, _ in axes), size, *rest),
        (*(step for _, step in axes), *strides),
        blocks=len(axes),
    )


def _lattice(offsets: list[int]) -> tuple[tuple[int, int], ...] | None:
    """Counts and positive steps of axes that run through the offsets in order, or None."""
    if len(offsets) == 1:
        return ()
    step = offsets[1] - offsets[0]
    count = next(
        (at for at, (one, two) in enumerate(pairwise(offsets), 1) if two - one != step),
        len(offsets),
    )
    if step <= 0 or len(offsets) % count:
        return None
    starts = offsets[::count]
    if any(offset != starts[at // count] + at % count * step for at, offset in enumerate(offsets)):
        return None
    outer = _lattice(starts)
    return None if outer is None else (*outer, (count, step))
