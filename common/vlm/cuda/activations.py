"""The gated activation and the rotary turn, each in one pass over the data.

Shapes: S = tokens, i = intermediate width, H = rotated heads, D = head width.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: ANN001, ANN202 - Triton types the arguments of its kernels
from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


_BLOCK = 1024


def gated_silu(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """silu(gate) * up.

    Args:
        gate, up, out: [S, i], contiguous in the last axis, any row stride; `out` is written.
    """
    rows, width = gate.shape
    if rows:
        blocks = triton.cdiv(width, _BLOCK)
        _gated[(rows * blocks,)](
            gate, up, out, gate.stride(0), up.stride(0), out.stride(0), width, blocks, BLOCK=_BLOCK
        )


def gated_silu_backward(
    gradient: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor, again: Tensor
) -> None:
    """Gradients of `gated_silu`, and its result again.

    Args:
        gradient, gate, up: [S, i], contiguous in the last axis.
        grad_gate, grad_up, again: likewise; written.
    """
    rows, width = gate.shape
    if rows:
        blocks = triton.cdiv(width, _BLOCK)
        _gated_backward[(rows * blocks,)](
            gradient,
            gate,
            up,
            grad_gate,
            grad_up,
            again,
            gradient.stride(0),
            gate.stride(0),
            up.stride(0),
            grad_gate.stride(0),
            grad_up.stride(0),
            again.stride(0),
            width,
            blocks,
            BLOCK=_BLOCK,
        )


def rotate_in_place(states: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
    """Turn the first heads of each row by the row's angles.

    Args:
        states: [S, heads or more, D], contiguous in the last axis; overwritten.
        heads: how many are turned.
        cos, sin: [S, D] contiguous.
    """
    rows, _, width = states.shape
    if rows:
        _rotate[(rows,)](
            states,
            cos,
            sin,
            states.stride(0),
            states.stride(1),
            heads,
            HALF=width // 2,
            HALF_BLOCK=triton.next_power_of_2(width // 2),
            HEADS_BLOCK=triton.next_power_of_2(heads),
        )


def rotate_back(gradient: Tensor, out: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
    """Gradient of a rotary turn, or a plain copy, between two layouts.

    Args:
        gradient: [H, S, D], any strides.
        out: [S, H, D], any strides; written.
        cos, sin: [S, D] contiguous, or None to copy only.
    """
    heads, rows, width = gradient.shape
    if rows:
        _turn_back[(rows,)](
            gradient,
            out,
            out if cos is None else cos,
            out if sin is None else sin,
            *gradient.stride(),
            *out.stride(),
            heads,
            HAS_ANGLES=cos is not None,
            HALF=width // 2,
            HALF_BLOCK=triton.next_power_of_2(width // 2),
            HEADS_BLOCK=triton.next_power_of_2(heads),
        )


@triton.jit
def _gated(gate, up, out, gate_row, up_row, out_row, width, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    silu = (g * tl.sigmoid(g)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * out_row + column, (silu * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_backward(
    gradient,
    gate,
    up,
    grad_gate,
    grad_up,
    again,
    gradient_row,
    gate_row,
    up_row,
    grad_gate_row,
    grad_up_row,
    again_row,
    width,
    blocks,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    d = tl.load(gradient + row * gradient_row + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    silu = (g * s).to(again.dtype.element_ty).to(tl.float32)
    dtype = grad_gate.dtype.element_ty
    dg = d * u * s * (1.0 + g * (1.0 - s))
    tl.store(grad_gate + row * grad_gate_row + column, dg.to(dtype), mask=inside)
    tl.store(grad_up + row * grad_up_row + column, (d * silu).to(dtype), mask=inside)
    tl.store(again + row * again_row + column, (silu * u).to(again.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    states,
    cos,
    sin,
    row_stride,
    head_stride,
    heads,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HALF_BLOCK)[None, :]
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    narrow = column < HALF
    inside = (head < heads) & narrow
    c1 = tl.load(cos + row * 2 * HALF + column, mask=narrow, other=0.0).to(tl.float32)
    c2 = tl.load(cos + row * 2 * HALF + HALF + column, mask=narrow, other=0.0).to(tl.float32)
    s1 = tl.load(sin + row * 2 * HALF + column, mask=narrow, other=0.0).to(tl.float32)
    s2 = tl.load(sin + row * 2 * HALF + HALF + column, mask=narrow, other=0.0).to(tl.float32)
    at = states + row * row_stride + head * head_stride + column
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    dtype = states.dtype.element_ty
    tl.store(at, (first * c1 - second * s1).to(dtype), mask=inside)
    tl.store(at + HALF, (second * c2 + first * s2).to(dtype), mask=inside)


@triton.jit
def _turn_back(
    gradient,
    out,
    cos,
    sin,
    gradient_head,
    gradient_row,
    gradient_column,
    out_row,
    out_head,
    out_column,
    heads,
    HAS_ANGLES: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HALF_BLOCK)[None, :]
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    narrow = column < HALF
    inside = (head < heads) & narrow
    at = gradient + row * gradient_row + head * gradient_head + column * gradient_column
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF * gradient_column, mask=inside, other=0.0).to(tl.float32)
    to = out + row * out_row + head * out_head + column * out_column
    dtype = out.dtype.element_ty
    if HAS_ANGLES:
        c1 = tl.load(cos + row * 2 * HALF + column, mask=narrow, other=0.0).to(tl.float32)
        c2 = tl.load(cos + row * 2 * HALF + HALF + column, mask=narrow, other=0.0).to(tl.float32)
        s1 = tl.load(sin + row * 2 * HALF + column, mask=narrow, other=0.0).to(tl.float32)
        s2 = tl.load(sin + row * 2 * HALF + HALF + column, mask=narrow, other=0.0).to(tl.float32)
        tl.store(to, (first * c1 + second * s2).to(dtype), mask=inside)
        tl.store(to + HALF * out_column, (second * c2 - first * s1).to(dtype), mask=inside)
    else:
        tl.store(to, first.to(dtype), mask=inside)
        tl.store(to + HALF * out_column, second.to(dtype), mask=inside)
