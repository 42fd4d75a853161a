"""What a decode step does to each row between its products.

Shapes: R = rows, h = hidden width, s = parts of a product, H = query heads, K = key/value heads,
D = head width, B = slots, S = lanes of a slot, Rc = room of a lane, N = positions in a table.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: ANN001, ANN202 - Triton types the arguments of its kernels
from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from common.vlm.cuda.early import launch_options, take_turn

if TYPE_CHECKING:
    from torch import Tensor

_HEADS_OF_PROGRAM = 8


def embed(
    embedding: Tensor,
    row_lane: Tensor,
    lane_token: Tensor,
    out: Tensor,
    *,
    first: int | None = None,
    early: bool = False,
) -> None:
    """Each row's hidden state.

    Args:
        embedding: [C, h], or a range of the vocabulary.
        row_lane: [R] int32, -1 for a row that is not used.
        lane_token: [B * S] int32, the token that each lane is fed.
        out: [R, h]; written, 0 for rows that are not used and for tokens outside the range.
        first: token where the range begins; None for the whole vocabulary.
        early: see `common.vlm.cuda.early`.
    """
    rows, width = out.shape
    block = triton.next_power_of_2(width)
    options = launch_options(early=early)
    _embed[(rows,)](
        embedding,
        row_lane,
        lane_token,
        out,
        width,
        FIRST=first or 0,
        RANGE=0 if first is None else embedding.shape[0],
        BLOCK=block,
        EARLY=early,
        num_warps=4,
        **options,
    )


def sum_norm(
    hidden: Tensor,
    parts: Tensor | None,
    weight: Tensor,
    eps: float,
    normed: Tensor,
    *,
    early: bool = False,
) -> None:
    """Add a product's parts to the hidden states, and norm them.

    Args:
        hidden: [R, h]; overwritten by the sum.
        parts: [s, R, h] float32, or None to norm only.
        weight: [h].
        eps: added to the mean square.
        normed: [R, h]; written.
        early: see `common.vlm.cuda.early`.
    """
    rows, width = hidden.shape
    block = triton.next_power_of_2(width)
    _sum_norm[(rows,)](
        hidden,
        hidden if parts is None else parts,
        weight,
        normed,
        rows,
        width,
        eps,
        PARTS=0 if parts is None else parts.shape[0],
        BLOCK=block,
        EARLY=early,
        num_warps=max(1, min(8, block // 256)),
        **launch_options(early=early),
    )


def split_heads(
    parts: Tensor,
    bias: Tensor,
    query: Tensor,
    private: Tensor,
    *,
    row_lane: Tensor,
    lane_tokens: Tensor,
    lane_position: Tensor,
    cosines: Tensor,
    sines: Tensor,
    early: bool = False,
) -> None:
    """Sum a projection's parts, turn queries and keys, and store the new keys and values.

    Args:
        parts: [s, R, (H + 2 K) * D] float32.
        bias: [(H + 2 K) * D].
        query: [R, H, D]; written.
        private: [2, B, S, K, Rc, D] of one layer; each used row's next place is written.
        row_lane: [R] int32.
        lane_tokens: [B * S] int32, tokens in each lane; a full lane is not written.
        lane_position: [B * S] int32, position of each lane's first token.
        cosines, sines: [N, D] in the compute dtype.
        early: see `common.vlm.cuda.early`.
    """
    count, rows, _ = parts.shape
    _, heads, width = query.shape
    _, slots, lanes, kv_heads, room, _ = private.shape
    all_heads = heads + 2 * kv_heads
    block_heads = min(_HEADS_OF_PROGRAM, triton.next_power_of_2(all_heads))
    _split_heads[(rows, triton.cdiv(all_heads, block_heads))](
        parts,
        bias,
        query,
        private,
        row_lane,
        lane_tokens,
        lane_position,
        cosines,
        sines,
        rows,
        slots * lanes,
        room,
        PARTS=count,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=width // 2,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=triton.next_power_of_2(width // 2),
        EARLY=early,
        num_warps=4,
        **launch_options(early=early),
    )


@triton.jit
def _embed(
    embedding,
    row_lane,
    lane_token,
    out,
    width,
    FIRST: tl.constexpr,
    RANGE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    take_turn(EARLY)
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    lane = tl.load(row_lane + row)
    token = tl.load(lane_token + tl.maximum(lane, 0)).to(tl.int64)
    there = inside & (lane >= 0)
    if RANGE > 0:
        token -= FIRST
        there = there & (token >= 0) & (token < RANGE)
    tl.store(
        out + row * width + column,
        tl.load(embedding + token * width + column, mask=there, other=0.0),
        mask=inside,
    )


@triton.jit
def _sum_norm(
    hidden,
    parts,
    weight,
    normed,
    rows,
    width,
    eps,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    take_turn(EARLY)
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    x = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
    dtype = hidden.dtype.element_ty
    if PARTS > 0:
        added = tl.zeros((BLOCK,), dtype=tl.float32)
        for part in tl.static_range(PARTS):
            added += tl.load(parts + part * rows * width + at, mask=inside, other=0.0)
        x = (x + added.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        tl.store(hidden + at, x.to(dtype), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    unit = (x * scale).to(dtype).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, (unit * w).to(dtype), mask=inside)


@triton.jit
def _halves(parts, bias, row, rows, at, inside, half, width, PARTS: tl.constexpr):
    """Sums of a projection's parts: the first and the second half of each head."""
    first = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(bias + at + half, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        source = parts + (part * rows + row) * width + at
        first += tl.load(source, mask=inside, other=0.0)
        second += tl.load(source + half, mask=inside, other=0.0)
    return first, second


@triton.jit
def _split_heads(
    parts,
    bias,
    query,
    private,
    row_lane,
    lane_tokens,
    lane_position,
    cosines,
    sines,
    rows,
    all_lanes,
    room,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    EARLY: tl.constexpr,
):
    take_turn(EARLY)
    row = tl.program_id(0)
    lane = tl.load(row_lane + row)
    if lane < 0:
        return
    tokens = tl.load(lane_tokens + lane)
    angle = (tl.load(lane_position + lane) + tokens) * 2 * HALF + tl.arange(0, BLOCK_HALF)[None, :]
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    narrow = column < HALF
    inside = (head < HEADS + 2 * KV_HEADS) & narrow
    at = head * 2 * HALF + column
    width = (HEADS + 2 * KV_HEADS) * 2 * HALF
    first, second = _halves(parts, bias, row, rows, at, inside, HALF, width, PARTS)
    dtype = query.dtype.element_ty
    first = first.to(dtype).to(tl.float32)
    second = second.to(dtype).to(tl.float32)
    c1 = tl.load(cosines + angle, mask=narrow, other=0.0).to(tl.float32)
    c2 = tl.load(cosines + angle + HALF, mask=narrow, other=0.0).to(tl.float32)
    s1 = tl.load(sines + angle, mask=narrow, other=0.0).to(tl.float32)
    s2 = tl.load(sines + angle + HALF, mask=narrow, other=0.0).to(tl.float32)
    turns = head < HEADS + KV_HEADS
    turned_first = tl.where(turns, first * c1 - second * s1, first).to(dtype)
    turned_second = tl.where(turns, second * c2 + first * s2, second).to(dtype)
    is_query = inside & (head < HEADS)
    to_query = query + row * HEADS * 2 * HALF + at
    tl.store(to_query, turned_first, mask=is_query)
    tl.store(to_query + HALF, turned_second, mask=is_query)
    # keys, then values: [part, lane, head, place, column]
    other = head - HEADS
    which = (other // KV_HEADS).to(tl.int64) * all_lanes + lane
    to_cache = private + ((which * KV_HEADS + other % KV_HEADS) * room + tokens) * 2 * HALF + column
    stored = inside & (head >= HEADS) & (tokens < room)
    tl.store(to_cache, turned_first, mask=stored)
    tl.store(to_cache + HALF, turned_second, mask=stored)
