"""Layouts of a whole model: every parameter of every rank. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import InvalidArgument
from common.layouts.kinds import (
    ROLLOUT_LAYOUTS,
    TRAIN_LAYOUTS,
    VOCABULARY_MULTIPLES,
    LayoutName,
)
from common.layouts.rows import Cut, even_rows, following, padded_rows
from common.layouts.tensors import Layout
from common.layouts.text import text_tensors
from common.layouts.tower import tower_tensors
from common.vlm.shape import vision_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.layouts.rows import Rows
    from common.vlm.shape import ModelShape

MOST_RANKS = 64
"""The largest tensor-parallel degree that is offered."""


def layout_pair(
    shape: ModelShape, train: tuple[str, int], rollout: tuple[str, int]
) -> tuple[Layout, Layout]:
    """Training's and the rollout's layout of a model.

    Where training's layout does not prescribe how the vocabulary is cut, it is cut as the rollout
    does.

    Args:
        train: name of the layout and tensor-parallel degree.
        rollout: the same of the rollout.
    Raises: InvalidArgument naming the key and what is legal.
    """
    train_kind = _kind("train_layout", train[0], TRAIN_LAYOUTS)
    rollout_kind = _kind("rollout_layout", rollout[0], ROLLOUT_LAYOUTS)
    for key, degree in (("train_tp", train[1]), ("rollout_tp", rollout[1])):
        if degree not in (legal := legal_degrees(shape)):
            raise InvalidArgument(
                f"{key} = {degree}: {shape.name} has {shape.heads} heads, {shape.kv_heads} "
                f"key/value heads and an MLP of {shape.inner}; legal are "
                f"{', '.join(map(str, legal))}"
            )
    rollout_rows = vocabulary_rows(rollout_kind, shape.vocabulary, rollout[1])
    if train_kind in VOCABULARY_MULTIPLES:
        train_rows = vocabulary_rows(train_kind, shape.vocabulary, train[1])
    else:
        train_rows = following(rollout_rows, shape.vocabulary, train[1])
    return (
        _layout(shape, train_kind, train_rows),
        _layout(shape, rollout_kind, rollout_rows),
    )


def legal_degrees(shape: ModelShape) -> list[int]:
    """Tensor-parallel degrees that divide heads and MLP, and divide or repeat key/value heads."""
    return [
        ranks
        for ranks in range(1, MOST_RANKS + 1)
        if shape.heads % ranks == 0
        and shape.inner % ranks == 0
        and (shape.kv_heads % ranks == 0 or ranks % shape.kv_heads == 0)
    ]


def vocabulary_rows(kind: LayoutName, size: int, ranks: int) -> tuple[Rows, ...]:
    """Every rank's rows of the two tables of tokens; with padding they may pass the end."""
    if (multiple := VOCABULARY_MULTIPLES.get(kind)) is None:
        return even_rows(size, ranks)
    return padded_rows(size, ranks, multiple)


def _layout(shape: ModelShape, kind: LayoutName, vocabulary: tuple[Rows, ...]) -> Layout:
    ranks = len(vocabulary)
    whole_tower = vision_ranks(shape.vision, ranks) == 1
    return Layout(
        name=kind,
        ranks=tuple(
            (
                *text_tensors(shape, kind, Cut(rank, ranks), vocabulary[rank]),
                *tower_tensors(shape, kind, Cut(0, 1) if whole_tower else Cut(rank, ranks)),
            )
            for rank in range(ranks)
        ),
        in_blocks=kind is LayoutName.NATIVE,
    )


def _kind(key: str, name: str, legal: Sequence[LayoutName]) -> LayoutName:
    if name not in legal:
        raise InvalidArgument(f"{key} = {name!r}: legal are {', '.join(legal)}")
    return LayoutName(name)
