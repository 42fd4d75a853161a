"""Where a rank's weights lie in their storage, which may be more than they are. Needs no torch.

Gradients, masters and moments follow a `WeightLayout` without a gap. So do the weights, but where a
plan of sharing gives a tensor more room than it has elements: it is a strided view then, and what
is between belongs to the rank of the rollout that gathers into it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from common.layouts.storage import View
from common.weights.errors import LayoutMismatch
from common.weights.layout import missing_error, padded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from common.layouts.plan import GpuSharing
    from common.weights.layout import WeightLayout


class Piece(NamedTuple):
    """Attributes: elements: of a flat range. view: where they lie, the last axis fastest."""

    elements: slice
    view: View


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlaces:
    """Of one rank.

    Attributes:
        layout: of the same weights without a gap; its order is the order here.
        views: by the names of its entries; a matrix has two axes, whatever else has more is whole.
        elements: length of the storage.
        gaps: whether anything of another's lies between the weights, or in their padding.
    """

    layout: WeightLayout
    views: Mapping[str, View]
    elements: int
    gaps: bool

    @classmethod
    def dense(cls, layout: WeightLayout) -> WeightPlaces:
        """Where the layout itself has them."""
        views = {
            entry.name: View.plain(entry.shape, offset=entry.offset_elements)
            for entry in layout.entries
        }
        return cls(layout=layout, views=views, elements=layout.total_elements, gaps=False)

    @classmethod
    def planned(cls, layout: WeightLayout, sharing: GpuSharing) -> WeightPlaces:
        """Where a plan has the tensors of a rank of training, in the layout's order.

        Raises: MissingWeight naming what the plan does not have; LayoutMismatch for a tensor of
            another shape.
        """
        names = {entry.name: [entry.name] for entry in layout.entries}
        for alias, name in layout.aliases.items():
            names[name].append(alias)
        known = _planned_views(sharing)
        found = {
            name: next((known[one] for one in given if one in known), None)
            for name, given in names.items()
        }
        if missing := [name for name, one in found.items() if one is None]:
            raise missing_error(missing, "the plan")
        starts: dict[tuple[int, int], int] = {}
        views: dict[str, View] = {}
        end = 0
        for entry in layout.entries:
            one = found[entry.name]
            assert one is not None, "missing ones are named above"
            buffer, room, view = one
            if view.numel != entry.numel or view.shape[0] != entry.shape[0]:
                raise LayoutMismatch(f"{entry.name} is {entry.shape}; the plan has {view.shape}")
            if buffer not in starts:
                starts[buffer] = end
                end += padded(room)
            views[entry.name] = replace(view, offset=starts[buffer] + view.offset)
        gaps = any(cluster.gap_elements for cluster in sharing.clusters)
        return cls(layout=layout, views=views, elements=end, gaps=gaps)

    def pieces(self, elements: slice) -> Iterator[Piece]:
        """The fewest strided pieces that hold a range of the layout's flat order.

        Args: elements: start and stop; they may lie inside of entries.
        Returns: pieces in order, counted from the range's start; where there are gaps, padding is
            in none of them.
        """
        start, stop = elements.start, elements.stop
        if not self.gaps:
            yield Piece(slice(0, stop - start), View.plain((stop - start,), offset=start))
            return
        run: Piece | None = None
        for entry in self.layout.entries:
            first = max(start - entry.offset_elements, 0)
            last = min(stop - entry.offset_elements, entry.numel)
            if first >= last:
                continue
            for part, view in _parts(self.views[entry.name], first, last):
                shift = entry.offset_elements - start
                piece = Piece(slice(part.start + shift, part.stop + shift), view)
                joined = None if run is None else _joined(run, piece)
                if run is not None and joined is None:
                    yield run
                run = joined or piece
        if run is not None:
            yield run


def _planned_views(sharing: GpuSharing) -> dict[str, tuple[tuple[int, int], int, View]]:
    """By name: which buffer of the plan, its elements, and the view of it."""
    return {
        name: ((number, layer), cluster.storage_elements, view)
        for number, cluster in enumerate(sharing.clusters)
        for tensor, view in zip(cluster.train, cluster.train_views, strict=True)
        for layer in range(tensor.count)
        for name in tensor.layer_names(layer)
    }


def _joined(one: Piece, other: Piece) -> Piece | None:
    """Two pieces as one, if the second follows the first in the flat order and in memory."""
    follows = one.elements.stop == other.elements.start
    flat = one.view.contiguous and other.view.contiguous
    if not (follows and flat and one.view.offset + one.view.numel == other.view.offset):
        return None
    size = one.view.numel + other.view.numel
    elements = slice(one.elements.start, other.elements.stop)
    return Piece(elements, View.plain((size,), offset=one.view.offset))


def _parts(view: View, first: int, last: int) -> Iterator[Piece]:
    """A range of a tensor's elements: of a matrix with gaps, part of a row, whole rows, part."""
    if view.contiguous:
        size = last - first
        yield Piece(slice(first, last), View.plain((size,), offset=view.offset + first))
        return
    _, width = view.shape
    row_stride, _ = view.strides
    while first < last:
        row, column = divmod(first, width)
        place = view.offset + row * row_stride + column
        rows = 0 if column else (last - first) // width
        size = rows * width or min(last - first, width - column)
        shape, strides = ((rows, width), view.strides) if rows else ((size,), (1,))
        yield Piece(slice(first, first + size), View(place, shape, strides))
        first += size
