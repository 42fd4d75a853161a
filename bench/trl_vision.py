"""Attention of transformers' Qwen2.5-VL tower with equally long windows in one call.

The library makes a call for every window and every picture; with pictures of thousands of patches
that is most of the tower's time. A baseline that runs the library's model should not pay for it.

Shapes: S = patches, D = width of the tower, W = windows of one length L, H = heads, E = D / H.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLVisionAttention,
    apply_rotary_pos_emb_vision,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_CALL_PATCHES = 1 << 18
"""Most patches of one call: more would not be faster and reach the limits of kernels' grids."""


@contextmanager
def batched_vision_attention() -> Iterator[None]:
    """Let the library's towers attend window by window no longer, while this is open."""
    attention: Any = Qwen2_5_VLVisionAttention
    original = attention.forward
    attention.forward = _forward
    try:
        yield
    finally:
        attention.forward = original


class _Reorder(torch.autograd.Function):
    """Rows in another order; the gradient is a gather too, not a sum by index."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        _, inverse = ctx.saved_tensors
        return gradients[0][inverse], None, None


def _forward(
    module: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **_ignored: Any,
) -> Tensor:
    """Stands in for `Qwen2_5_VLVisionAttention.forward`.

    Args:
        hidden_states: [S, D].
        cu_seqlens: [windows + 1], first patches of the windows and S.
        position_embeddings: cosines and sines, [S, E] each.
    Returns: [S, D].
    """
    lengths = cu_seqlens.diff().long()
    distinct, counts = lengths.unique(return_counts=True)
    blocks = list(zip(distinct.tolist(), counts.tolist(), strict=True))
    if len(blocks) == 1:
        return _blocks(module, hidden_states, position_embeddings, blocks)
    patches = len(hidden_states)
    order = lengths.repeat_interleave(lengths, output_size=patches).argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(patches, device=order.device)
    cos, sin = (part[order] for part in position_embeddings)
    sorted_SD = _Reorder.apply(hidden_states, order, inverse)
    return _Reorder.apply(_blocks(module, sorted_SD, (cos, sin), blocks), inverse, order)


def _blocks(
    module: Any,
    hidden_SD: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    blocks: list[tuple[int, int]],
) -> Tensor:
    """Attention of windows sorted by length.

    Args:
        blocks: length L and number W of windows, in the patches' order.
    Returns: [S, D].
    """
    qkv = module.qkv(hidden_SD).view(len(hidden_SD), 3, module.num_heads, -1)
    cos, sin = position_embeddings
    outputs: list[Tensor] = []
    start = 0
    for length, windows in blocks:
        at_once = max(1, _CALL_PATCHES // length)
        for first in range(0, windows, at_once):
            count = min(at_once, windows - first)
            place = slice(start, start + count * length)
            start = place.stop
            query, key, value = qkv[place].unbind(1)
            query, key = apply_rotary_pos_emb_vision(query, key, cos[place], sin[place])
            q, k, v = (
                part.unflatten(0, (count, length)).transpose(1, 2) for part in (query, key, value)
            )
            attended_WHLE = F.scaled_dot_product_attention(q, k, v, scale=module.scaling)
            outputs.append(attended_WHLE.transpose(1, 2).reshape(count * length, -1))
    return module.proj(torch.cat(outputs))
