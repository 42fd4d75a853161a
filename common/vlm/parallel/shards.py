"""Which part of every parameter a tensor-parallel rank holds. Needs no torch.

Text model: query, gate and up projections by rows, output and down projections by columns, key and
value projections by rows of whole heads, embeddings and head by rows of the vocabulary; norms
whole. With more ranks than key/value heads, consecutive ranks hold the same head. The vision tower
is split the same way, its fused ``qkv`` by heads inside each third, if the ranks divide its heads
and its inner width; else every rank holds all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.layouts.box import Box
from common.vlm.errors import DegreeInvalid
from common.vlm.names import VISUAL
from common.vlm.shape import vision_ranks
from common.weights.layout import TensorSpec, WeightLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.vlm.shape import ModelShape

ROWS, COLUMNS, HEADS, THIRDS = "rows", "columns", "heads", "thirds"
_TEXT_RULES = {
    "self_attn.q_proj": ROWS,
    "self_attn.k_proj": HEADS,
    "self_attn.v_proj": HEADS,
    "self_attn.o_proj": COLUMNS,
    "mlp.gate_proj": ROWS,
    "mlp.up_proj": ROWS,
    "mlp.down_proj": COLUMNS,
    "embed_tokens": ROWS,
    "lm_head": ROWS,
}
_VISION_RULES = {
    "attn.qkv": THIRDS,
    "attn.proj": COLUMNS,
    "mlp.gate_proj": ROWS,
    "mlp.up_proj": ROWS,
    "mlp.down_proj": COLUMNS,
    "merger.mlp.0": ROWS,
    "merger.mlp.2": COLUMNS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank holds of one parameter.

    Attributes:
        whole: shape of the parameter without tensor parallelism.
        boxes: the rank's parts, joined along the first axis.
        holders: all ranks with the same parts, in order.
    """

    whole: tuple[int, ...]
    boxes: tuple[Box, ...]
    holders: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rank's parameter."""
        first, *rest = self.boxes[0].shape
        return (first * len(self.boxes), *rest)


def legal_degrees(shape: ModelShape) -> tuple[int, ...]:
    """Numbers of ranks over which the text model can be split."""
    return tuple(
        degree
        for degree in range(1, shape.heads + 1)
        if shape.heads % degree == 0
        and (shape.kv_heads % degree == 0 or degree % shape.kv_heads == 0)
        and shape.inner % degree == 0
        and shape.vocabulary % degree == 0
    )


def check_degree(shape: ModelShape, degree: int) -> None:
    """Refuse a number of ranks that does not split the text model evenly.

    Raises: DegreeInvalid naming the sizes and the legal degrees.
    """
    legal = legal_degrees(shape)
    if degree not in legal:
        raise DegreeInvalid(
            f"tensor-parallel degree = {degree} does not divide {shape.name}: {shape.heads} query "
            f"heads, {shape.kv_heads} key/value heads, inner width {shape.inner}, vocabulary "
            f"{shape.vocabulary}; legal are {', '.join(map(str, legal))}",
            degree=degree,
        )


def local_kv_heads(shape: ModelShape, degree: int) -> int:
    """Key/value heads of one rank."""
    return max(1, shape.kv_heads // degree)


def shards(layout: WeightLayout, shape: ModelShape, *, rank: int, degree: int) -> dict[str, Shard]:
    """The rank's part of every parameter.

    Args:
        layout: of the whole model (world 1).
        shape: of the same model.
        rank: in the tensor-parallel group.
        degree: size of that group.
    Returns: by the names of the layout's entries.
    Raises: DegreeInvalid as `check_degree` does.
    """
    check_degree(shape, degree)
    return {
        entry.name: _shard(entry.name, entry.shape, shape, rank, degree) for entry in layout.entries
    }


def rank_layout(
    layout: WeightLayout, parts: Mapping[str, Shard], *, rank: int, degree: int
) -> WeightLayout:
    """The places of a rank's parts in its own flat buffers, in the order of the whole layout.

    Args:
        layout: of the whole model (world 1).
        parts: from `shards` of this rank.
        rank, degree: as there.
    """
    return WeightLayout.build(
        [
            TensorSpec(
                name=entry.name,
                shape=parts[entry.name].shape,
                trainable=entry.trainable,
                decay=entry.decay,
            )
            for entry in layout.entries
        ],
        dtype=layout.dtype,
        aliases=layout.aliases,
        rank=rank,
        world=degree,
    )


def _shard(name: str, whole: tuple[int, ...], shape: ModelShape, rank: int, degree: int) -> Shard:
    rule = _rule(name, shape, degree)
    if degree == 1 or rule is None:
        return Shard(whole=whole, boxes=(Box.whole(whole),), holders=tuple(range(degree)))
    if rule == COLUMNS:
        boxes = (Box((*Box.whole(whole).ranges[:-1], _part(whole[-1], rank, degree))),)
        return Shard(whole=whole, boxes=boxes, holders=(rank,))
    if rule == THIRDS:
        third = whole[0] // 3
        start, stop = _part(third, rank, degree)
        rows = [(first + start, first + stop) for first in (0, third, 2 * third)]
        return Shard(whole=whole, boxes=_row_boxes(whole, rows), holders=(rank,))
    # ranks that share a part follow each other
    parts = min(degree, shape.kv_heads) if rule == HEADS else degree
    sharing = degree // parts
    number = rank // sharing
    return Shard(
        whole=whole,
        boxes=_row_boxes(whole, [_part(whole[0], number, parts)]),
        holders=tuple(range(number * sharing, (number + 1) * sharing)),
    )


def _rule(name: str, shape: ModelShape, degree: int) -> str | None:
    """How a parameter is split; None: not at all."""
    owner, _, leaf = name.rpartition(".")
    rules = _TEXT_RULES
    if name.startswith(VISUAL):
        if vision_ranks(shape.vision, degree) == 1:
            return None
        rules = _VISION_RULES
    for suffix, rule in rules.items():
        if owner.endswith(suffix):
            # the sum over columns is complete before the bias is added
            return None if rule == COLUMNS and leaf == "bias" else rule
    return None


def _part(size: int, number: int, parts: int) -> tuple[int, int]:
    return size * number // parts, size * (number + 1) // parts


def _row_boxes(whole: tuple[int, ...], rows: list[tuple[int, int]]) -> tuple[Box, ...]:
    return tuple(Box((part, *Box.whole(whole).ranges[1:])) for part in rows)
