"""Arithmetic that a step cannot do without, whatever its schedule.

Counted: a product of an [a, b] matrix with b values is 2 a b; attention 4 D a query head, query and
key that it sees. A backward is two forwards. Nothing is counted twice: one prefix a group and role,
no recomputation, no engine prefill of its own. The formula, with n and v the weights of the text
and vision matrices, u those of the head, P and T a group's prefix and response tokens, V vision
patches, L layers, h = heads x D, and r = 1 if there is a reference:

    text       2 n (P (3 + r) + T (4 + r))            policy forward and backward; decode
    head       2 u T (4 + r)
    attention  4 L h ((P^2 / 2) (3 + r) + T P (4 + r))
    vision     2 v V (1, or 3 + r where the tower trains)

Attention inside the responses and in the tower is left out: under 2 % of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from common.vlm.loading import (
    empty_model,
    head_dim,
    load_config,
    text_config,
    vision_config,
    weight_layout,
)
from common.vlm.names import VISUAL

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What the formula needs of a model.

    Attributes:
        text, vision, head: weights in matrices.
        attention_width: query heads times their width.
        patches_per_token: vision patches of a vision token.
    """

    text: int
    vision: int
    head: int
    layers: int
    attention_width: int
    patches_per_token: int

    @classmethod
    def of(cls, model: Path) -> ModelSizes:
        """Read a model folder's configuration."""
        config = load_config(model)
        layout = weight_layout(
            empty_model(config, dtype=torch.float32), train_vision=False, dtype=torch.float32
        )
        text = text_config(config)
        head = text.vocab_size * text.hidden_size
        matrices = {e.name: math.prod(e.shape) for e in layout.entries if len(e.shape) > 1}
        vision = sum(size for name, size in matrices.items() if name.startswith(VISUAL))
        tables = head if text.tie_word_embeddings else 2 * head
        return cls(
            text=sum(matrices.values()) - vision - tables,
            vision=vision,
            head=head,
            layers=text.num_hidden_layers,
            attention_width=text.num_attention_heads * head_dim(config),
            patches_per_token=vision_config(config).spatial_merge_size ** 2,
        )


def step_flops(
    sizes: ModelSizes,
    *,
    groups: int,
    prompt_tokens: int,
    vision_tokens: int,
    response_tokens: int,
    train_vision: bool,
    reference: bool,
) -> float:
    """Operations of one step; see the module's text.

    Args:
        prompt_tokens: P of one group.
        vision_tokens: of one group.
        response_tokens: of all groups.
    """
    roles = 1 if reference else 0
    prefix, responses = prompt_tokens - 1, response_tokens
    text = 2 * sizes.text * (groups * prefix * (3 + roles) + responses * (4 + roles))
    head = 2 * sizes.head * responses * (4 + roles)
    seen = groups * prefix**2 / 2 * (3 + roles) + responses * prefix * (4 + roles)
    attention = 4 * sizes.layers * sizes.attention_width * seen
    passes = 3 + roles if train_vision else 1
    vision = 2 * sizes.vision * groups * vision_tokens * sizes.patches_per_token * passes
    return float(text + head + attention + vision)
