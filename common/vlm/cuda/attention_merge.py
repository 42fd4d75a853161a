"""Attention over two sets of keys, from the attention over each and its log-sum.

Shapes: H = query heads, T = rows, D = head width.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: ANN001, ANN202 - Triton types the arguments of its kernels
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


def merge(
    first: Tensor, first_sum: Tensor, second: Tensor, second_sum: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys, from the attention over each.

    Args:
        first, second: [H, T, D], any strides.
        first_sum, second_sum: [H, T] float32 contiguous log-sums.
    Returns: [H, T, D], a view of [T, H, D]; and [H, T] float32.
    """
    heads, rows, width = first.shape
    out = torch.empty((rows, heads, width), dtype=first.dtype, device=first.device)
    total = torch.empty_like(first_sum)
    _merge[(rows,)](
        first,
        first_sum,
        second,
        second_sum,
        out,
        total,
        *first.stride(),
        *second.stride(),
        rows,
        heads,
        width,
        HEADS_BLOCK=triton.next_power_of_2(heads),
        WIDTH_BLOCK=triton.next_power_of_2(width),
    )
    return out.transpose(0, 1), total


@triton.jit
def _merge(
    first,
    first_sum,
    second,
    second_sum,
    out,
    total,
    first_head,
    first_row,
    first_column,
    second_head,
    second_row,
    second_column,
    rows,
    heads,
    width,
    HEADS_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_BLOCK)
    column = tl.arange(0, WIDTH_BLOCK)[None, :]
    there = head < heads
    inside = there[:, None] & (column < width)
    sum1 = tl.load(first_sum + head * rows + row, mask=there, other=0.0)
    sum2 = tl.load(second_sum + head * rows + row, mask=there, other=0.0)
    top = tl.maximum(sum1, sum2)
    joint = top + tl.log(tl.exp(sum1 - top) + tl.exp(sum2 - top))
    tl.store(total + head * rows + row, joint, mask=there)
    at1 = first + row * first_row + head[:, None] * first_head + column * first_column
    at2 = second + row * second_row + head[:, None] * second_head + column * second_column
    x1 = tl.load(at1, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(at2, mask=inside, other=0.0).to(tl.float32)
    mixed = x1 * tl.exp(sum1 - joint)[:, None] + x2 * tl.exp(sum2 - joint)[:, None]
    to = out + row * heads * width + head[:, None] * width + column
    tl.store(to, mixed.to(out.dtype.element_ty), mask=inside)
