"""Attention of one decode step: all lanes of a group against its one prefix, then their own.

The prefix's keys are cut into items that different programs read; a row's program then reads its
own keys and merges the items of its group by their log-sums.

Shapes: R = rows, B = slots, S = lanes of a slot, K = key/value heads, Q = query heads of each,
D = head width, Pc and Rc = capacities, I = items, M = S * Q.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: ANN001, ANN202 - Triton types the arguments of its kernels
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How the attention kernels are cut.

    Attributes:
        prefix_keys: keys of one step over a prefix.
        own_keys: keys of one step over a row's own tokens.
        stages, warps: of the prefix kernel.
        own_stages, own_warps: of the rows' kernel.
    """

    prefix_keys: int = 64
    own_keys: int = 64
    stages: int = 3
    warps: int = 4
    own_stages: int = 3
    own_warps: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Where items leave their results.

    Attributes:
        out: [I, K, M, D] float32.
        log_sum: [I, K, M] float32, base 2.
    """

    out: Tensor
    log_sum: Tensor

    @classmethod
    def make(
        cls, *, items: int, kv_heads: int, rows: int, width: int, device: torch.device
    ) -> Scratch:
        """Allocate for I items of M rows."""
        shape = (items, kv_heads, rows)
        return cls(
            out=torch.empty((*shape, width), dtype=torch.float32, device=device),
            log_sum=torch.empty(shape, dtype=torch.float32, device=device),
        )


def plan_items(
    prefix_tokens: Sequence[tuple[int, int]], *, slots: int, items: int, block: int
) -> tuple[list[int], list[int]]:
    """Cut the prefixes of the slots in use into about equal pieces.

    Args:
        prefix_tokens: slot and prefix length of each slot in use; a length of 0 has no item.
        slots: B.
        items: how many pieces there may be, at least one a slot in use.
        block: pieces are multiples of this many keys.
    Returns: (slot, first key, end) of each of the I items, flat, unused ones with end 0; and
        (first item, number of items) of each of the B slots, flat.
    """
    lengths = [(slot, length) for slot, length in prefix_tokens if length > 0]
    blocks = [-(-length // block) for _, length in lengths]
    size = max(1, -(-sum(blocks) // max(1, items - len(lengths) + 1)))
    while sum(-(-count // size) for count in blocks) > items:
        size += 1
    flat: list[int] = []
    ranges = [0] * (2 * slots)
    for (slot, length), count in zip(lengths, blocks, strict=True):
        pieces = -(-count // size)
        ranges[2 * slot : 2 * slot + 2] = [len(flat) // 3, pieces]
        for piece in range(pieces):
            begin = piece * size * block
            flat += [slot, begin, min(length, begin + size * block)]
    return flat + [0] * (3 * items - len(flat)), ranges


def attend(
    query: Tensor,
    shared: Tensor,
    private: Tensor,
    out: Tensor,
    *,
    row_lane: Tensor,
    lane_row: Tensor,
    lane_tokens: Tensor,
    items: Tensor,
    ranges: Tensor,
    scratch: Scratch,
    blocks: Blocks,
) -> None:
    """Attention of R rows.

    Args:
        query: [R, K * Q, D], turned.
        shared: [2, B, K, Pc, D] of one layer.
        private: [2, B, S, K, Rc, D] of one layer, the rows' new tokens included.
        out: [R, K * Q, D]; written.
        row_lane: [R] int32, slot * S + lane of each row; -1 for a row that is not used.
        lane_row: [B * S] int32, the row of each lane or -1.
        lane_tokens: [B * S] int32, tokens in each lane before the new one.
        items, ranges: int32, as from `plan_items`.
        scratch: for as many items.
        blocks: how the kernels are cut.
    """
    rows, heads, width = query.shape
    _, slots, lanes, kv_heads, room, _ = private.shape
    per_kv = heads // kv_heads
    count = scratch.out.shape[0]
    group_rows = lanes * per_kv
    block_rows = min(64, max(16, triton.next_power_of_2(group_rows)))
    scale = width**-0.5 * 1.4426950408889634
    width_block = triton.next_power_of_2(width)
    _attend_prefix[(count, kv_heads, triton.cdiv(group_rows, block_rows))](
        query,
        shared,
        scratch.out,
        scratch.log_sum,
        lane_row,
        items,
        scale,
        slots,
        lanes,
        shared.shape[3],
        WIDTH=width,
        PER_KV=per_kv,
        KV_HEADS=kv_heads,
        BLOCK_ROWS=block_rows,
        BLOCK_KEYS=blocks.prefix_keys,
        BLOCK_WIDTH=width_block,
        num_stages=blocks.stages,
        num_warps=blocks.warps,
    )
    _attend_own[(rows, kv_heads)](
        query,
        private,
        out,
        scratch.out,
        scratch.log_sum,
        row_lane,
        lane_tokens,
        ranges,
        scale,
        slots,
        lanes,
        room,
        WIDTH=width,
        PER_KV=per_kv,
        KV_HEADS=kv_heads,
        BLOCK_ROWS=max(16, triton.next_power_of_2(per_kv)),
        BLOCK_KEYS=blocks.own_keys,
        BLOCK_WIDTH=width_block,
        BLOCK_ITEMS=4,
        num_stages=blocks.own_stages,
        num_warps=blocks.own_warps,
    )


@triton.jit
def _attend_prefix(
    query,
    shared,
    part_out,
    part_sum,
    lane_row,
    items,
    scale,
    slots,
    lanes,
    room,
    WIDTH: tl.constexpr,
    PER_KV: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    item = tl.program_id(0)
    kv = tl.program_id(1)
    slot = tl.load(items + 3 * item)
    begin = tl.load(items + 3 * item + 1)
    end = tl.load(items + 3 * item + 2)
    if end == 0:
        return
    member = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    there = member < lanes * PER_KV
    row = tl.load(lane_row + slot * lanes + member // PER_KV, mask=there, other=-1)
    head = kv * PER_KV + member % PER_KV
    column = tl.arange(0, BLOCK_WIDTH)
    wide = column < WIDTH
    q_at = query + (row * KV_HEADS * PER_KV + head)[:, None] * WIDTH + column[None, :]
    q = tl.load(q_at, mask=(row >= 0)[:, None] & wide[None, :], other=0.0)
    base = (slot * KV_HEADS + kv).to(tl.int64) * room * WIDTH
    values = (tl.zeros((), dtype=tl.int64) + slots) * KV_HEADS * room * WIDTH
    top = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    total = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), dtype=tl.float32)
    for first in range(begin, end, BLOCK_KEYS):
        key = first + tl.arange(0, BLOCK_KEYS)
        inside = key < end
        at = shared + base + key[:, None] * WIDTH + column[None, :]
        k = tl.load(at, mask=inside[:, None] & wide[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, axis=1))
        weight = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(top - new)
        mass = mass * shrink + tl.sum(weight, axis=1)
        v = tl.load(at + values, mask=inside[:, None] & wide[None, :], other=0.0)
        total = tl.dot(weight.to(v.dtype), v, total * shrink[:, None])
        top = new
    place = (item * KV_HEADS + kv) * lanes * PER_KV + member
    tl.store(part_sum + place, top + tl.log2(mass), mask=there)
    to = part_out + place.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(to, total / mass[:, None], mask=there[:, None] & wide[None, :])


@triton.jit
def _attend_own(
    query,
    private,
    out,
    part_out,
    part_sum,
    row_lane,
    lane_tokens,
    ranges,
    scale,
    slots,
    lanes,
    room,
    WIDTH: tl.constexpr,
    PER_KV: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
):
    row = tl.program_id(0)
    kv = tl.program_id(1)
    lane = tl.load(row_lane + row)
    if lane < 0:
        return
    tokens = tl.minimum(tl.load(lane_tokens + lane) + 1, room)
    slot = lane // lanes
    member = tl.arange(0, BLOCK_ROWS)
    there = member < PER_KV
    column = tl.arange(0, BLOCK_WIDTH)
    wide = column < WIDTH
    seen = there[:, None] & wide[None, :]
    place = (row * KV_HEADS + kv) * PER_KV + member
    q = tl.load(query + place[:, None] * WIDTH + column[None, :], mask=seen, other=0.0)
    base = (lane * KV_HEADS + kv).to(tl.int64) * room * WIDTH
    values = (tl.zeros((), dtype=tl.int64) + slots) * lanes * KV_HEADS * room * WIDTH
    top = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    total = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), dtype=tl.float32)
    for first in range(0, tokens, BLOCK_KEYS):
        key = first + tl.arange(0, BLOCK_KEYS)
        inside = key < tokens
        at = private + base + key[:, None] * WIDTH + column[None, :]
        k = tl.load(at, mask=inside[:, None] & wide[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, axis=1))
        weight = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(top - new)
        mass = mass * shrink + tl.sum(weight, axis=1)
        v = tl.load(at + values, mask=inside[:, None] & wide[None, :], other=0.0)
        total = tl.dot(weight.to(v.dtype), v, total * shrink[:, None])
        top = new
    first_item = tl.load(ranges + 2 * slot)
    count = tl.load(ranges + 2 * slot + 1)
    inner = (lane % lanes) * PER_KV + member
    for start in range(0, count, BLOCK_ITEMS):
        item = start + tl.arange(0, BLOCK_ITEMS)
        used = item < count
        at = ((first_item + item) * KV_HEADS + kv)[:, None] * lanes * PER_KV + inner[None, :]
        both = used[:, None] & there[None, :]
        sums = tl.load(part_sum + at, mask=both, other=float("-inf"))
        new = tl.maximum(top, tl.max(sums, axis=0))
        # rows past the last head have nothing but minus infinity
        calm = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(sums - calm[None, :])
        shrink = tl.exp2(top - calm)
        parts = tl.load(
            part_out + at.to(tl.int64)[:, :, None] * WIDTH + column[None, None, :],
            mask=both[:, :, None] & wide[None, None, :],
            other=0.0,
        )
        mass = mass * shrink + tl.sum(weight, axis=0)
        total = total * shrink[:, None] + tl.sum(parts * weight[:, :, None], axis=0)
        top = new
    result = total / mass[:, None]
    to = out + place[:, None] * WIDTH + column[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=seen)
