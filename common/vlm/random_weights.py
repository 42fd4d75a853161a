"""Weights that follow from a configuration and a seed alone, made where they lie."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch

from common.vlm.parallel.state import take_shard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from common.vlm.parallel.shards import Shard

EMBEDDING_STD = 0.02
_EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")


def fill_random(
    tensors: Mapping[str, Tensor], *, seed: int, shards: Mapping[str, Shard] | None = None
) -> None:
    """Fill weights: matrices with 1 / sqrt(fan-in), norms 1, biases 0.

    A tensor's values depend on seed, name, shape, dtype and kind of device, not on its place, so
    layouts of a trained and of a frozen tower get equal ones, and ranks the parts of equal ones.

    Args:
        tensors: of the whole model by name, or with `shards` of a rank; any device; written.
        seed: any integer.
        shards: the rank's part of every tensor; one whole tensor is held beside the buffer.
    """
    for name, view in tensors.items():
        if view.dim() == 1:
            view.fill_(0.0 if name.endswith(".bias") else 1.0)
            continue
        digest = hashlib.blake2b(f"{seed}|{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(view.device).manual_seed(int.from_bytes(digest) >> 1)
        part = None if shards is None else shards[name]
        whole = view if part is None else view.new_empty(part.whole)
        fan_in = math.prod(whole.shape[1:])
        std = EMBEDDING_STD if name.endswith(_EMBEDDINGS) else 1.0 / math.sqrt(fan_in)
        whole.normal_(0.0, std, generator=generator)
        if part is not None:
            view.copy_(take_shard(whole, part))
