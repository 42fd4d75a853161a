"""The text model's tensors of one rank. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.layouts.kinds import attention, columns, gate_and_up, rows, whole
from common.layouts.tensors import RankTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.layouts.kinds import LayoutName
    from common.layouts.rows import Cut, Rows
    from common.vlm.shape import ModelShape

_MODEL = "model.language_model."
_LAYER = f"{_MODEL}layers.*."


def text_tensors(
    shape: ModelShape, kind: LayoutName, cut: Cut, vocabulary: Rows
) -> Iterator[RankTensor]:
    """Embeddings, layers, last norm and output head; a tied head is the embeddings' second name.

    Args:
        vocabulary: this rank's rows of the two tables; they may pass the vocabulary's end.
    """
    table = (shape.vocabulary, shape.width)
    embeddings = rows(f"{_MODEL}embed_tokens.weight", table, vocabulary, 1)
    if shape.tied:
        yield RankTensor((embeddings.name, "lm_head.weight"), embeddings.parts)
    else:
        yield embeddings
        yield rows("lm_head.weight", table, vocabulary, 1)
    yield whole(f"{_MODEL}norm.weight", (shape.width,), 1)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield whole(f"{_LAYER}{norm}.weight", (shape.width,), shape.layers)
    yield from _attention(shape, kind, cut)
    yield from _mlp(shape, kind, cut)


def _attention(shape: ModelShape, kind: LayoutName, cut: Cut) -> Iterator[RankTensor]:
    name, count, head = f"{_LAYER}self_attn.", shape.layers, shape.head_width
    own_heads, own_kv = cut.heads(shape.heads, head), cut.heads(shape.kv_heads, head)
    tails: list[tuple[str, tuple[int, ...]]] = [("weight", (shape.width,))]
    if shape.attention_bias:
        tails.append(("bias", ()))
    for leaf, tail in tails:
        parts = [
            rows(f"{name}{letter}_proj.{leaf}", (heads * head, *tail), own, count)
            for letter, heads, own in (
                ("q", shape.heads, own_heads),
                ("k", shape.kv_heads, own_kv),
                ("v", shape.kv_heads, own_kv),
            )
        ]
        yield from attention(kind, f"{name}qkv_proj.{leaf}", parts, head)
    yield columns(f"{name}o_proj.weight", (shape.width, shape.heads * head), own_heads, count)
    if shape.output_bias:
        yield whole(f"{name}o_proj.bias", (shape.width,), count)
    if shape.head_norms:
        yield whole(f"{name}q_norm.weight", (head,), count)
        yield whole(f"{name}k_norm.weight", (head,), count)


def _mlp(shape: ModelShape, kind: LayoutName, cut: Cut) -> Iterator[RankTensor]:
    name, count, own = f"{_LAYER}mlp.", shape.layers, cut.even(shape.inner)
    parts = [
        rows(f"{name}{one}_proj.weight", (shape.inner, shape.width), own, count)
        for one in ("gate", "up")
    ]
    yield from gate_and_up(kind, f"{name}gate_up_proj.weight", parts)
    yield columns(f"{name}down_proj.weight", (shape.width, shape.inner), own, count)
