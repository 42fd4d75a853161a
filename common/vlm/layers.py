"""The steps of one decoder layer, with the library's projections, norms and MLP.

Shapes: S = tokens, h = hidden width, H = query heads, K = key/value heads, D = head width.
There is no batch axis: several sequences are one row of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines, each [S, D], in the hidden states' dtype."""


def rotary(language_model: Any, hidden: Tensor, positions: Tensor) -> Rotary:
    """Cosines and sines for tokens at these positions.

    Args:
        language_model: the text model, whose rotary module is used.
        hidden: [S, h]; gives dtype and device.
        positions: [3, S] int64.
    """
    cos, sin = language_model.rotary_emb(hidden[None], positions[:, None])
    return cos[0], sin[0]


def rotate(states: Tensor, angles: Rotary) -> Tensor:
    """Turn queries or keys [heads, S, D] by their tokens' angles."""
    cos, sin = angles
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


def key_value(layer: Any, normed: Tensor, angles: Rotary) -> tuple[Tensor, Tensor]:
    """Keys, turned, and values: each [K, S, D], of normed hidden states [S, h]."""
    attention = layer.self_attn
    key = _heads(attention.k_proj(normed), attention.head_dim)
    value = _heads(attention.v_proj(normed), attention.head_dim)
    return rotate(key, angles), value


def queries(layer: Any, normed: Tensor, angles: Rotary) -> Tensor:
    """Queries, turned: [H, S, D], of normed hidden states [S, h]."""
    attention = layer.self_attn
    return rotate(_heads(attention.q_proj(normed), attention.head_dim), angles)


def finish(layer: Any, hidden: Tensor, attended: Tensor) -> Tensor:
    """Output projection, residual and MLP.

    Args:
        layer: the decoder layer.
        hidden: [S, h]; what entered the layer.
        attended: [H, S, D].
    Returns: [S, h].
    """
    merged = attended.transpose(0, 1).reshape(hidden.shape[0], -1)
    hidden = hidden + layer.self_attn.o_proj(merged)
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def _heads(projected: Tensor, width: int) -> Tensor:
    rows, total = projected.shape
    return projected.view(rows, total // width, width).transpose(0, 1)
