"""Every parameter of a model, and how much of it one tensor-parallel rank holds.

Projections into heads, the MLP's inner width and the vocabulary are split over the ranks; norms,
the tower's patch and position embeddings, and biases of projections back to the model's width are
whole on every rank. Key and value heads are split as far as there are heads, then held twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from common.vlm.shape import QWEN3, vision_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.vlm.shape import ModelShape


class Split(StrEnum):
    """How a parameter lies on the ranks of a tensor-parallel group."""

    WHOLE = "whole"
    """On every rank."""
    EVEN = "even"
    """An equal part on every rank."""
    KV_HEADS = "kv_heads"
    """By key/value heads; whole heads, held by several ranks where there are more ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A parameter, or several of one size.

    Attributes:
        elements: of one of them.
        count: how many there are.
        vision: whether it is the tower's or its merger's.
    """

    name: str
    elements: int
    count: int = 1
    split: Split = Split.WHOLE
    vision: bool = False


def weights(shape: ModelShape) -> tuple[Weight, ...]:
    """All parameters; a tied output head is none of its own."""
    return (*_text(shape), *_vision(shape))


def parameter_count(shape: ModelShape) -> int:
    """Parameters of the whole model."""
    return sum(weight.elements * weight.count for weight in weights(shape))


def kv_heads_of_rank(shape: ModelShape, ranks: int) -> int:
    """Key/value heads that one of so many ranks holds."""
    return max(1, shape.kv_heads // ranks)


def rank_elements(shape: ModelShape, ranks: int, *, trainable_vision: bool = True) -> int:
    """Parameters of one rank.

    Args:
        ranks: of the tensor-parallel group.
        trainable_vision: whether the tower and its merger count.
    """
    tower = vision_ranks(shape.vision, ranks)
    total = 0
    for weight in weights(shape):
        if weight.vision and not trainable_vision:
            continue
        part = weight.elements * weight.count
        if weight.split is Split.EVEN:
            part //= tower if weight.vision else ranks
        elif weight.split is Split.KV_HEADS:
            part = part // shape.kv_heads * kv_heads_of_rank(shape, ranks)
        total += part
    return total


def _text(shape: ModelShape) -> Iterator[Weight]:
    width, layers = shape.width, shape.layers
    queries = shape.heads * shape.head_width
    keys = shape.kv_heads * shape.head_width
    table = shape.vocabulary * width
    yield Weight(name="token embeddings", elements=table, split=Split.EVEN)
    if not shape.tied:
        yield Weight(name="output head", elements=table, split=Split.EVEN)
    yield Weight(name="q_proj", elements=width * queries, count=layers, split=Split.EVEN)
    yield Weight(
        name="k_proj, v_proj", elements=width * keys, count=2 * layers, split=Split.KV_HEADS
    )
    if shape.attention_bias:
        yield Weight(name="q_proj bias", elements=queries, count=layers, split=Split.EVEN)
        yield Weight(
            name="k_proj, v_proj bias", elements=keys, count=2 * layers, split=Split.KV_HEADS
        )
    yield Weight(name="o_proj", elements=queries * width, count=layers, split=Split.EVEN)
    if shape.output_bias:
        yield Weight(name="o_proj bias", elements=width, count=layers)
    if shape.head_norms:
        yield Weight(name="q_norm, k_norm", elements=shape.head_width, count=2 * layers)
    yield Weight(
        name="gate_proj, up_proj, down_proj",
        elements=width * shape.inner,
        count=3 * layers,
        split=Split.EVEN,
    )
    yield Weight(name="norms", elements=width, count=2 * layers + 1)


def _vision(shape: ModelShape) -> Iterator[Weight]:
    tower, newer = shape.vision, shape.model_type == QWEN3
    width, inner, depth = tower.width, tower.inner, tower.depth

    def weight(name: str, elements: int, count: int = 1, *, split: Split = Split.WHOLE) -> Weight:
        return Weight(
            name=f"tower {name}", elements=elements, count=count, split=split, vision=True
        )

    projections = 2 if newer else 3
    yield weight("patch embedding", (tower.patch_elements + newer) * width)
    yield weight("position embeddings", tower.positions * width)
    yield weight("qkv", 3 * width * (width + 1), depth, split=Split.EVEN)
    yield weight("attention output", width * width, depth, split=Split.EVEN)
    yield weight("MLP", projections * width * inner, depth, split=Split.EVEN)
    yield weight("MLP inner biases", (projections - 1) * inner, depth, split=Split.EVEN)
    yield weight("output biases", 2 * width, depth)
    yield weight("norms", (2 if newer else 1) * 2 * width, depth)
    merged = tower.merged_patches * width
    mergers = 1 + tower.deepstack
    yield weight("merger", merged * (merged + tower.out_width), mergers, split=Split.EVEN)
    yield weight("merger inner bias", merged, mergers, split=Split.EVEN)
    yield weight("merger output bias", tower.out_width, mergers)
    # the first merger norms patches before they are merged, those of inner layers after
    norm = (2 if newer else 1) * width
    yield weight("merger norm", norm)
    yield weight("inner mergers' norms", 2 * merged, tower.deepstack)
