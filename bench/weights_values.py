"""Values of a model's weights: ranks that have the same part of a tensor have the same values."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from common.layouts.tensors import Part, RankTensor


def fill_sources(tensors: Sequence[RankTensor], sources: Mapping[str, Tensor]) -> None:
    """Write training's tensors of one rank.

    Args:
        tensors: the rank's, as its layout has them.
        sources: by name, one dtype and device; padding becomes 0.
    """
    for one in tensors:
        for layer in range(one.count):
            memory = sources[one.layer_names(layer)[0]]
            rows = torch.cat([_piece(part, layer, memory) for part in one.parts])
            memory.copy_(rows.view(memory.shape))


def _piece(part: Part, layer: int, like: Tensor) -> Tensor:
    piece = like.new_zeros(part.box.shape)
    if part.real is not None:
        seed = zlib.crc32(f"{part.tensor.name}|{layer}".encode())
        generator = torch.Generator(like.device).manual_seed(seed)
        whole = like.new_empty(part.tensor.shape).normal_(generator=generator)
        inside = tuple(slice(size) for size in part.real.shape)
        piece[inside] = whole[tuple(slice(*ends) for ends in part.real.ranges)]
    return piece
