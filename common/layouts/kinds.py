"""Kinds of layout, and how each joins the matrices of a layer. Needs no torch."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from common.layouts.box import Box
from common.layouts.tensors import LogicalTensor, Part, RankTensor, row_box

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.layouts.rows import Rows


class LayoutName(StrEnum):
    """Kinds of layout."""

    NATIVE = "native"
    """Every parameter by itself; the model reads matrices in blocks where they lie so."""
    MEGATRON = "megatron"
    """Queries, keys, values joined group by group; gate and up joined; vocabulary padded."""
    SGLANG = "sglang"
    """Queries, keys, values joined one after the other; gate and up joined; vocabulary padded."""


TRAIN_LAYOUTS = (LayoutName.NATIVE, LayoutName.MEGATRON)
"""Layouts that training may have."""

ROLLOUT_LAYOUTS = (LayoutName.NATIVE, LayoutName.SGLANG)
"""Layouts that the rollout may have."""

VOCABULARY_MULTIPLES = {LayoutName.MEGATRON: 128, LayoutName.SGLANG: 64}
"""Rows a rank to whose multiple the vocabulary is padded; other layouts do not pad it."""


def whole(name: str, shape: tuple[int, ...], count: int, *, vision: bool = False) -> RankTensor:
    """A tensor that every rank has whole."""
    tensor = LogicalTensor(name=name, shape=shape, count=count, vision=vision)
    return RankTensor((name,), (Part(tensor, row_box(0, *shape)),))


def columns(
    name: str, shape: tuple[int, int], cut: Rows, count: int, *, vision: bool = False
) -> RankTensor:
    """A matrix that is cut along its second axis."""
    tensor = LogicalTensor(name=name, shape=shape, count=count, vision=vision)
    return RankTensor((name,), (Part(tensor, Box(((0, shape[0]), cut))),))


def rows(
    name: str, shape: tuple[int, ...], cut: Rows, count: int, *, vision: bool = False
) -> RankTensor:
    """A tensor that is cut along its first axis."""
    tensor = LogicalTensor(name=name, shape=shape, count=count, vision=vision)
    return RankTensor((name,), (Part(tensor, row_box(*cut, *shape[1:])),))


def attention(
    kind: LayoutName, joined: str, parts: Sequence[RankTensor], head_width: int
) -> tuple[RankTensor, ...]:
    """Queries, keys and values of one rank, as this kind of layout has them.

    Args:
        joined: name of the joined tensor.
        parts: queries, keys and values, each a tensor of one part.
        head_width: rows of one head.
    """
    if kind is LayoutName.NATIVE:
        return tuple(parts)
    if kind is LayoutName.SGLANG:
        return (one_after_the_other(joined, parts),)
    groups = parts[1].shape[0] // head_width
    return (
        RankTensor(
            (joined,),
            tuple(_piece(one.parts[0], group, groups) for group in range(groups) for one in parts),
        ),
    )


def gate_and_up(
    kind: LayoutName, joined: str, parts: Sequence[RankTensor]
) -> tuple[RankTensor, ...]:
    """The two input matrices of a gated MLP of one rank, as this kind of layout has them."""
    if kind is LayoutName.NATIVE:
        return tuple(parts)
    return (one_after_the_other(joined, parts),)


def one_after_the_other(name: str, parts: Sequence[RankTensor]) -> RankTensor:
    """Tensors joined along their rows."""
    return RankTensor((name,), tuple(part for one in parts for part in one.parts))


def _piece(part: Part, number: int, pieces: int) -> Part:
    """One of several equal runs of a part's rows."""
    start, stop = part.box.ranges[0]
    size = (stop - start) // pieces
    first = start + number * size
    return Part(part.tensor, Box(((first, first + size), *part.box.ranges[1:])))
