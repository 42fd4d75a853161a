"""Boxes of tensors as strided memory of one rank's buffers. Needs no torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from common.layouts.box import Box
from common.layouts.storage import View

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from common.layouts.sharing import ClusterSharing, Move, TensorSharing
    from common.layouts.tensors import Part


class Buffer(NamedTuple):
    """Flat memory of one rank.

    Attributes:
        cluster: index in `GpuSharing.clusters`.
        own: index of the rollout's tensor whose own buffer it is; None: shared with training.
    """

    cluster: int
    layer: int
    own: int | None = None


class Region(NamedTuple):
    """Rows of a tensor that lie at one stride; `view.blocks` is 0."""

    buffer: Buffer
    view: View

    @property
    def elements(self) -> int:
        """Of the region."""
        return math.prod(self.view.shape)


def target_view(shared: TensorSharing) -> View:
    """Where a tensor of the rollout lies in the buffer shared with training, or in its own."""
    return View.plain(shared.tensor.shape) if shared.view is None else shared.view


def regions(buffer: Buffer, view: View, row: int, part: Part, box: Box) -> Iterator[Region]:
    """A box of a part in memory, by rows.

    Args:
        view: of the tensor that the part belongs to.
        row: of that tensor, where the part starts.
        box: logical indices.
    """
    (start, stop), *rest = box.ranges
    (first, _), *origins = part.box.ranges
    strides = view.strides[view.blocks :]
    inside = sum(
        (at - origin) * step
        for (at, _), (origin, _), step in zip(rest, origins, strides[1:], strict=True)
    )
    for offset, rows in view.runs(row + start - first, row + stop - first):
        yield Region(buffer, View(offset + inside, (rows, *box.shape[1:]), strides))


def target_regions(
    shared: TensorSharing, number: int, box: Box, buffer: Buffer, tensor: int
) -> Iterator[Region]:
    """Where a box of a part of the rollout's tensor lies.

    Args:
        number: of the part.
        buffer: the one shared with training.
        tensor: index among the rollout's tensors of the cluster.
    """
    row, part = list(shared.tensor.placed_parts())[number]
    place = buffer if shared.view is not None else buffer._replace(own=tensor)
    return regions(place, target_view(shared), row, part, box)


def source_regions(held: ClusterSharing, wanted: Part, box: Box, buffer: Buffer) -> list[Region]:
    """Where training's tensors of a rank hold a box of the part's logical tensor."""
    for tensor, view in zip(held.train, held.train_views, strict=True):
        for row, part in tensor.placed_parts():
            if part.tensor.name == wanted.tensor.name and part.box.contains(box):
                return list(regions(buffer, view, row, part, box))
    raise AssertionError(f"no training tensor of the rank has {wanted.tensor.name} {box}")


def copies(
    shared: TensorSharing, tensor: int, move: Move, held: ClusterSharing, buffer: Buffer
) -> Iterator[tuple[Region, Region]]:
    """Target and source of a move, in pieces that lie at one stride in both.

    Args:
        shared, tensor: the rollout's tensor, and its index among those of the cluster.
        held: the cluster of the training rank that the move is from.
        buffer: the one shared with training; a source's is the same one of that rank.
    """
    part, row = shared.tensor.parts[move.part], move.box.ranges[0][0]
    for target in target_regions(shared, move.part, move.box, buffer, tensor):
        stop = row + target.view.shape[0]
        rows = Box(((row, stop), *move.box.ranges[1:]))
        sources = source_regions(held, part, rows, buffer)
        yield from zip(_split(target, sources), sources, strict=True)
        row = stop


def _split(region: Region, like: Sequence[Region]) -> Iterator[Region]:
    """The region in pieces of as many rows as others have."""
    buffer, view = region
    row = 0
    for one in like:
        rows = one.view.shape[0]
        offset = view.offset + row * view.strides[0]
        yield Region(buffer, View(offset, (rows, *view.shape[1:]), view.strides))
        row += rows
