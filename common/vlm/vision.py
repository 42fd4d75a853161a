"""The vision tower's forward, with attention batched over windows of equal size.

Shapes: N = patches of all images or videos, h = tower width, A = attention heads, D = head width,
V = merged patches = N / merge^2.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_position_ids,
    get_vision_window_index,
)

from common.vlm.checkpointing import run_block
from common.vlm.layers import Rotary, rotate

if TYPE_CHECKING:
    from collections.abc import Sequence

Segments = tuple[Tensor, ...]
"""For each distinct length, the [segments, length] int64 indices of the patches of each segment."""


class VisionBlocks(Protocol):
    """The tower's steps: the seam where other kernels take the place of the plain ones."""

    def embed(self, patch_embed: Any, pixels: Tensor) -> Tensor:
        """[N, h] hidden states of patches [N, patch values]."""

    def plan(self, bounds: Sequence[int], device: torch.device) -> Any:
        """What `block` needs to know about the segments; made once, used in several blocks.

        Args:
            bounds: first 0, then the end of each segment.
            device: of the hidden states.
        """

    def block(self, block: Any, hidden: Tensor, angles: Rotary, plan: Any) -> Tensor:
        """[N, h]: one block, every patch seeing all others of its segment."""


def vision_tower(
    visual: Any,
    pixels: Tensor,
    grid_thw: Tensor,
    *,
    checkpointing: bool,
    blocks: VisionBlocks | None = None,
) -> Tensor:
    """Features of images or videos.

    Args:
        visual: the library's vision model.
        pixels: [N, patch values], any floating dtype.
        grid_thw: [images, 3] int64; patches of each image, N in all.
        checkpointing: keep each block's input only.
        blocks: the tower's steps; the plain ones if not given.
    Returns: [V, text hidden width], in the order of the grids.
    """
    steps = blocks or PlainBlocks()
    device = pixels.device
    grid = grid_thw.cpu()
    unit = visual.spatial_merge_size**2
    window_index, window_bounds = get_vision_window_index(
        grid,
        spatial_merge_size=visual.spatial_merge_size,
        window_size=visual.window_size,
        patch_size=visual.patch_size,
    )
    frames = steps.plan(get_vision_cu_seqlens(grid).tolist(), device)
    windows = steps.plan(window_bounds.tolist(), device)
    window_index = window_index.to(device)
    patch_order = (window_index[:, None] * unit + torch.arange(unit, device=device)).reshape(-1)
    hidden = steps.embed(visual.patch_embed, pixels)[patch_order]
    positions = get_vision_position_ids(grid, visual.spatial_merge_size).to(device)
    cos, sin = visual.rotary_pos_emb(hidden, positions)
    angles = (cos[patch_order], sin[patch_order])
    for number, block in enumerate(visual.blocks):
        where = frames if number in visual.fullatt_block_indexes else windows
        hidden = run_block(steps.block, block, hidden, angles, where, checkpointing=checkpointing)
    return visual.merger(hidden)[torch.argsort(window_index)]


class PlainBlocks:
    """The library's modules, with windows of one size batched; runs everywhere."""

    def embed(self, patch_embed: Any, pixels: Tensor) -> Tensor:
        """See `VisionBlocks.embed`."""
        return patch_embed(pixels)

    def plan(self, bounds: Sequence[int], device: torch.device) -> Segments:
        """See `VisionBlocks.plan`."""
        return segments(bounds, device)

    def block(self, block: Any, hidden: Tensor, angles: Rotary, plan: Segments) -> Tensor:
        """See `VisionBlocks.block`."""
        hidden = hidden + _attention(block.attn, block.norm1(hidden), angles, plan)
        return hidden + block.mlp(block.norm2(hidden))


def segments(bounds: Sequence[int], device: torch.device) -> Segments:
    """Group segments of a row by length, so that each group is one batched attention.

    Args:
        bounds: first 0, then the end of each segment.
        device: of the result.
    """
    starts_of: dict[int, list[int]] = {}
    for start, end in pairwise(bounds):
        starts_of.setdefault(end - start, []).append(start)
    return tuple(
        (torch.tensor(starts)[:, None] + torch.arange(length)).to(device)
        for length, starts in starts_of.items()
    )


def _attention(attention: Any, normed: Tensor, angles: Rotary, where: Segments) -> Tensor:
    """Attention [N, h] inside each segment, every patch seeing all others of its segment."""
    patches = normed.shape[0]
    qkv = attention.qkv(normed).view(patches, 3, attention.num_heads, -1).permute(1, 2, 0, 3)
    query, key = (_rotate_float(states, angles) for states in (qkv[0], qkv[1]))
    value = qkv[2]
    outputs = [_attend(query, key, value, index) for index in where]
    order = torch.argsort(torch.cat([index.reshape(-1) for index in where]))
    return attention.proj(torch.cat(outputs)[order])


def _rotate_float(states: Tensor, angles: Rotary) -> Tensor:
    # the tower turns queries and keys in float32 whatever its dtype
    cos, sin = angles
    return rotate(states.float(), (cos.float(), sin.float())).to(states.dtype)


def _attend(query: Tensor, key: Tensor, value: Tensor, index: Tensor) -> Tensor:
    """Attention of equally long segments [n, length] of [A, N, D]; returns [n * length, A * D]."""
    q, k, v = (states[:, index].transpose(0, 1) for states in (query, key, value))
    attended = F.scaled_dot_product_attention(q, k, v)
    return attended.transpose(1, 2).reshape(index.numel(), -1)
