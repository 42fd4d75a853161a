"""Weights that follow from a configuration and a seed alone, made where they lie."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch

from common.weights.binding import views

if TYPE_CHECKING:
    from torch import Tensor

    from common.weights.layout import WeightLayout

EMBEDDING_STD = 0.02
_EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")


def fill_random(flat: Tensor, layout: WeightLayout, *, seed: int) -> None:
    """Fill flat weights: matrices with 1 / sqrt(fan-in), norms 1, biases 0, padding 0.

    A tensor's values depend on seed, name, shape, dtype and kind of device, not on its place, so
    layouts of a trained and of a frozen tower get equal ones.

    Args:
        flat: [total_elements], any device; written.
        layout: must be of the whole model (world 1).
        seed: any integer.
    """
    flat.zero_()
    for name, view in views(flat, layout).items():
        if view.dim() == 1:
            view.fill_(0.0 if name.endswith(".bias") else 1.0)
            continue
        digest = hashlib.blake2b(f"{seed}|{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(flat.device).manual_seed(int.from_bytes(digest) >> 1)
        fan_in = math.prod(view.shape[1:])
        std = EMBEDDING_STD if name.endswith(_EMBEDDINGS) else 1.0 / math.sqrt(fan_in)
        view.normal_(0.0, std, generator=generator)
