"""Products of few rows with large weights: what matters is to stream the weights once.

Tiles come by tensor descriptors, which Hopper's bulk tensor copy engine loads: rows of x and of
the weights begin at multiples of 16 bytes.

Shapes: R = rows (sequences that decode one token), n = output width, k = input width,
s = parts into which k is cut.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: ANN001, ANN202 - Triton types the arguments of its kernels
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from common.vlm.cuda.activations import gated_silu
from common.vlm.cuda.early import launch_options, prefetch, take_turn

if TYPE_CHECKING:
    from torch import Tensor

_SHARED_BYTES = 220 * 1024
"""Of one program's loads in flight; with more rows than planned for, fewer steps are."""


_PART_MULTIPLE = 128
"""Of elements; `Tiles.inner` divides it."""

_LINE = tl.constexpr(64)
"""Elements of 16 bits in a cache line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How a product is cut.

    Attributes:
        columns: outputs of one program.
        inner: inputs of one step, 64 or 128.
        splits: parts of the inputs that different programs add up; the caller sums them.
        stages: steps whose loads are in flight.
        warps: of one program.
    """

    columns: int
    inner: int
    splits: int = 1
    stages: int = 4
    warps: int = 4


def linear(
    x: Tensor, weight: Tensor, out: Tensor, tiles: Tiles | None, *, early: bool = False
) -> None:
    """Parts of x @ weight^T.

    Args:
        x: [R, k] contiguous.
        weight: [n, k] contiguous.
        out: [s, R, n]; written, in its dtype. Its sum over s is the product.
        tiles: with `splits` equal to s; None for the vendor's library, then s is 1.
        early: see `common.vlm.cuda.early`; the weights must not be a predecessor's result.
    """
    if tiles is None:
        _library_product(x, weight, out[0])
        return
    _launch(x, weight, out, tiles, gated=False, early=early)


def gated_linear(
    x: Tensor, weight: Tensor, out: Tensor, tiles: Tiles | None, *, early: bool = False
) -> None:
    """silu(x @ gate^T) * (x @ up^T).

    Args:
        x: [R, k] contiguous.
        weight: [2 n, k] contiguous, the gate's rows first.
        out: [1, R, n]; written.
        tiles: with one split; None for the vendor's library.
        early: as in `linear`.
    """
    if tiles is None:
        joint = x @ weight.t()
        gate, up = joint.chunk(2, dim=1)
        gated_silu(gate, up, out[0])
        return
    assert tiles.splits == 1
    _launch(x, weight, out, tiles, gated=True, early=early)


def splits(tiles: Tiles | None) -> int:
    """s of a product."""
    return 1 if tiles is None else tiles.splits


def _library_product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    if out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)


def _part_elements(inner: int, splits: int) -> int:
    """Inputs of one part: the same for all tiles, so that they add in the same order."""
    return triton.cdiv(triton.cdiv(inner, splits), _PART_MULTIPLE) * _PART_MULTIPLE


def _launch(
    x: Tensor, weight: Tensor, out: Tensor, tiles: Tiles, *, gated: bool, early: bool
) -> None:
    rows, inner = x.shape
    columns = out.shape[-1]
    block_rows = min(128, max(16, triton.next_power_of_2(rows)))
    step_bytes = (block_rows + (2 if gated else 1) * tiles.columns) * tiles.inner * x.element_size()
    steps = _part_elements(inner, tiles.splits) // tiles.inner
    stages = max(1, min(tiles.stages, _SHARED_BYTES // step_bytes))
    grid = (triton.cdiv(columns, tiles.columns), tiles.splits, triton.cdiv(rows, block_rows))
    _product[grid](
        TensorDescriptor.from_tensor(x, [block_rows, tiles.inner]),
        TensorDescriptor.from_tensor(weight, [tiles.columns, tiles.inner]),
        weight,
        out,
        rows,
        columns,
        inner,
        steps,
        GATED=gated,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=tiles.columns,
        BLOCK_INNER=tiles.inner,
        EARLY=early,
        PREFETCH=min(stages, steps) if early else 0,
        num_stages=stages,
        num_warps=tiles.warps,
        **launch_options(early=early),
    )


@triton.jit
def _fetch(
    weight,
    w_row,
    first,
    inner,
    columns,
    GATED: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    STEPS: tl.constexpr,
):
    line = tl.arange(0, BLOCK_INNER // _LINE) * _LINE
    for number in tl.static_range(STEPS):
        offset = tl.minimum((first + number) * BLOCK_INNER + line, inner - 1)
        at = weight + w_row[:, None] * inner + offset[None, :]
        prefetch(at)
        if GATED:
            prefetch(at + (tl.zeros((), dtype=tl.int64) + columns) * inner)


@triton.jit
def _product(
    x,
    weights,
    weight,
    out,
    rows,
    columns,
    inner,
    steps,
    GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    EARLY: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """`x` and `weights` are descriptors: past their ends are zeros. `weight` is to prefetch."""
    part = tl.program_id(1)
    first_row = tl.program_id(2) * BLOCK_ROWS
    first_column = tl.program_id(0) * BLOCK_COLUMNS
    row = first_row + tl.arange(0, BLOCK_ROWS)
    column = first_column + tl.arange(0, BLOCK_COLUMNS)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    above = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    first = part * steps
    last = tl.minimum(first + steps, tl.cdiv(inner, BLOCK_INNER))
    w_row = tl.minimum(column, columns - 1).to(tl.int64)
    _fetch(weight, w_row, first, inner, columns, GATED, BLOCK_INNER, PREFETCH)
    take_turn(EARLY)
    for step in range(first, last):
        at = step * BLOCK_INNER
        a = x.load([first_row, at])
        w = weights.load([first_column, at])
        total = tl.dot(a, w.T, total)
        if GATED:
            w_up = weights.load([columns + first_column, at])
            above = tl.dot(a, w_up.T, above)
    if GATED:
        total = _gate(total, above, out.dtype.element_ty)
    to = out + (part * rows + row).to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate(gate, up, dtype: tl.constexpr):
    """silu(gate) * up, rounded where separate products would round."""
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    return silu * up.to(dtype).to(tl.float32)
