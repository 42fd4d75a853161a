"""Logical tensors, and what a rank holds of them. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from common.layouts.box import Box
from common.weights.errors import LayoutInvalid

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalTensor:
    """A weight of the model, independent of ranks and of how an engine fuses it.

    Attributes:
        name: one ``*`` stands for the layer where there are several.
        count: layers that have one of this shape.
        vision: whether it is the tower's or a merger's.
    """

    name: str
    shape: tuple[int, ...]
    count: int = 1
    vision: bool = False

    @property
    def numel(self) -> int:
        """Elements of one layer's."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Part:
    """A box of a logical tensor inside a rank's tensor.

    Attributes:
        box: rows past the logical tensor's end are padding, which stays zero.
    """

    tensor: LogicalTensor
    box: Box

    @property
    def rows(self) -> int:
        """Extent along the first axis."""
        return self.box.shape[0]

    @cached_property
    def real(self) -> Box | None:
        """The box without padding; None if all of it is padding."""
        return self.box.intersect(Box.whole(self.tensor.shape))


@dataclass(frozen=True)
class RankTensor:
    """One tensor of one rank: parts joined along the first axis.

    Attributes:
        names: of the parameter; tied parameters are one tensor with several names.
        parts: in order of rows, equal in all other extents.
    Raises: LayoutInvalid if there is no part, or they do not fit together.
    """

    names: tuple[str, ...]
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise LayoutInvalid(f"{self.name}: a tensor needs at least one part")
        if len({(part.box.shape[1:], part.tensor.count) for part in self.parts}) != 1:
            raise LayoutInvalid(
                f"{self.name}: parts differ in layers or in an extent other than the first"
            )

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """All rows of all parts, then the extents that the parts share."""
        return (sum(part.rows for part in self.parts), *self.parts[0].box.shape[1:])

    @cached_property
    def numel(self) -> int:
        """Elements of one layer's, padding included."""
        return math.prod(self.shape)

    @property
    def count(self) -> int:
        """Layers that have one."""
        return self.parts[0].tensor.count

    def layer_names(self, layer: int) -> tuple[str, ...]:
        """Its names in one of the layers, counted from 0."""
        return tuple(name.replace("*", str(layer)) for name in self.names)

    @property
    def row_elements(self) -> int:
        """Elements of one row."""
        return math.prod(self.shape[1:])

    def placed_parts(self) -> Iterator[tuple[int, Part]]:
        """Every part with the row at which it starts."""
        row = 0
        for part in self.parts:
            yield row, part
            row += part.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What every rank of a tensor-parallel group holds.

    Attributes:
        name: of the kind of layout.
        ranks: tensors of every rank; all ranks have the same names in the same order.
        in_blocks: whether its owner reads a matrix whose rows lie in equal blocks with equal gaps,
            a view of more than two axes. If not, a matrix has to be one plain strided view.
    """

    name: str
    ranks: tuple[tuple[RankTensor, ...], ...]
    in_blocks: bool

    @property
    def degree(self) -> int:
        """Ranks of the group."""
        return len(self.ranks)


def row_box(start: int, stop: int, *rest: int) -> Box:
    """Rows of a tensor whose other axes are whole."""
    return Box(((start, stop), *((0, size) for size in rest)))
