"""RMS normalisation in one pass over the data, forward and backward.

Shapes: S = tokens, h = hidden width. Arithmetic is float32; results are rounded where the
library's modules round them.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: ANN001, ANN202 - Triton types the arguments of its kernels
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS_AT_ONCE = 528
"""Programs of the backward; each leaves one row of partial weight gradients."""


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normed hidden states.

    Args:
        hidden: [S, h] contiguous rows, CUDA.
        weight: [h].
        eps: added to the mean square.
    Returns: [S, h] in the dtype of `hidden`.
    """
    out = torch.empty_like(hidden)
    rows, width = hidden.shape
    if rows:
        block = triton.next_power_of_2(width)
        _norm[(rows,)](
            hidden,
            hidden,
            weight,
            hidden,
            out,
            width,
            eps,
            HAS_ADDED=False,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return out


def add_rms_norm(
    hidden: Tensor, added: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """A residual sum and its normed states, in one pass.

    Args:
        hidden, added: [S, h] contiguous.
        weight: [h].
        eps: added to the mean square.
    Returns: `hidden + added` and its normed states, each [S, h].
    """
    total, out = torch.empty_like(hidden), torch.empty_like(hidden)
    rows, width = hidden.shape
    if rows:
        block = triton.next_power_of_2(width)
        _norm[(rows,)](
            hidden,
            added,
            weight,
            total,
            out,
            width,
            eps,
            HAS_ADDED=True,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return total, out


def rms_norm_backward(
    gradient: Tensor, hidden: Tensor, weight: Tensor, eps: float, residual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `rms_norm`, and its result again for whoever needs it for weight gradients.

    Args:
        gradient: [S, h] of the normed states.
        hidden: [S, h], the forward's input.
        weight: [h].
        eps: as in the forward.
        residual: [S, h], added to the gradient of `hidden`; or None.
    Returns: gradient of `hidden` [S, h], gradient of `weight` [h] float32, normed states [S, h].
    """
    rows, width = hidden.shape
    block = triton.next_power_of_2(width)
    programs = max(1, min(rows, _ROWS_AT_ONCE))
    grad_hidden, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    partial = torch.empty((programs, width), dtype=torch.float32, device=hidden.device)
    _norm_backward[(programs,)](
        gradient,
        hidden,
        weight,
        gradient if residual is None else residual,
        grad_hidden,
        normed,
        partial,
        rows,
        width,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return grad_hidden, partial.sum(0), normed


def _warps(block: int) -> int:
    return max(1, min(16, block // 256))


@triton.jit
def _norm(
    hidden,
    added,
    weight,
    total,
    out,
    width,
    eps,
    HAS_ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(hidden + row + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_ADDED:
        more = tl.load(added + row + column, mask=inside, other=0.0).to(tl.float32)
        rounded = (x + more).to(total.dtype.element_ty)
        tl.store(total + row + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    unit = (x * scale).to(out.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, (unit * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    gradient,
    hidden,
    weight,
    residual,
    grad_hidden,
    normed,
    partial,
    rows,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    for number in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = (tl.zeros((), dtype=tl.int64) + number) * width
        x = tl.load(hidden + row + column, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(gradient + row + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
        unit = x * scale
        rounded = unit.to(normed.dtype.element_ty).to(tl.float32)
        tl.store(normed + row + column, (rounded * w).to(normed.dtype.element_ty), mask=inside)
        grad_weight += dy * rounded
        scaled = dy * w
        dx = scale * (scaled - unit * (tl.sum(scaled * unit, axis=0) / width))
        if HAS_RESIDUAL:
            dx += tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_hidden + row + column, dx.to(grad_hidden.dtype.element_ty), mask=inside)
    tl.store(partial + tl.program_id(0) * width + column, grad_weight, mask=inside)
