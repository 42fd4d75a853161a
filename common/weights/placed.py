"""Weights in the storage that their places are of, by name and in the flat order of their layout.

Shapes: E elements of a layout, Es of the storage of its weights, n of a range of the flat order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.weights.errors import LayoutMismatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from common.layouts.storage import View
    from common.weights.places import WeightPlaces


def strided(flat: Tensor, view: View) -> Tensor:
    """A view of a flat buffer, without a copy."""
    return flat.as_strided(view.shape, view.strides, flat.storage_offset() + view.offset)


def placed(flat: Tensor, places: WeightPlaces) -> dict[str, Tensor]:
    """All weights by name.

    Args: flat: [Es], any device.
    Returns: views of `flat` in the order of the layout, in the shapes that it has.
    Raises: LayoutMismatch if `flat` has another length.
    """
    _check(flat, places)
    return {
        entry.name: strided(flat, places.views[entry.name]).view(entry.shape)
        for entry in places.layout.entries
    }


class PlacedRange:
    """[n] of the flat order, wherever each of them lies."""

    def __init__(self, flat: Tensor, places: WeightPlaces, elements: slice) -> None:
        """Args:
        flat: [Es].
        elements: of the flat order, [n] of them; they may begin and end inside of tensors.
        Raises: LayoutMismatch if `flat` has another length.
        """
        _check(flat, places)
        self._pieces = tuple((part, strided(flat, view)) for part, view in places.pieces(elements))
        self._flat, self._size = flat, elements.stop - elements.start
        whole = len(self._pieces) == 1 and self._pieces[0][1].shape == (self._size,)
        self.whole = self._pieces[0][1] if whole else None
        """[n], a view, where nothing lies between; None: something does."""

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """Ranges of [n] in order, each with the memory that has it, the last axis fastest."""
        return iter(self._pieces)

    def new_zeros(self) -> Tensor:
        """[n] of the same dtype and device."""
        return self._flat.new_zeros(self._size)

    def copy_(self, values: Tensor) -> None:
        """Write [n] of any dtype; what lies between stays as it is."""
        for part, place in self._pieces:
            place.copy_(values[part].view(place.shape))

    def copy_to(self, values: Tensor) -> None:
        """Read into [n]; of padding behind a tensor with gaps, nothing is written."""
        for part, place in self._pieces:
            values[part].view(place.shape).copy_(place)


def _check(flat: Tensor, places: WeightPlaces) -> None:
    if flat.dim() != 1 or flat.numel() != places.elements:
        raise LayoutMismatch(
            f"a buffer of shape {tuple(flat.shape)} does not fit places of {places.elements} "
            "elements"
        )
