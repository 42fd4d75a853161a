"""Kernels of a decode step's attention; see `decode_attention` for shapes and meaning."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: ANN001, ANN201, ANN202 - Triton types the arguments of its kernels
from __future__ import annotations

import triton
import triton.language as tl

from common.vlm.cuda.early import take_turn


@triton.jit
def attend_parts(
    query,
    shared,
    private,
    item_out,
    item_sum,
    own_out,
    own_sum,
    row_lane,
    lane_row,
    lane_tokens,
    items,
    scale,
    item_count,
    slots,
    lanes,
    prefix_room,
    own_room,
    WIDTH: tl.constexpr,
    PER_KV: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PREFIX_KEYS: tl.constexpr,
    OWN_KEYS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs below `item_count` read a piece of a prefix, the others a row's own keys."""
    take_turn(EARLY)
    number = tl.program_id(0)
    kv = tl.program_id(1)
    if number < item_count:
        _prefix_item(
            query, shared, item_out, item_sum, lane_row, items, scale, number, kv,
            slots, lanes, prefix_room,
            WIDTH, PER_KV, KV_HEADS, BLOCK_MEMBERS, PREFIX_KEYS, BLOCK_WIDTH, STAGES,
        )  # fmt: skip
    elif tl.program_id(2) == 0:
        _own_keys(
            query, private, own_out, own_sum, row_lane, lane_tokens, scale, number - item_count, kv,
            slots, lanes, own_room,
            WIDTH, PER_KV, KV_HEADS, BLOCK_HEADS, OWN_KEYS, BLOCK_WIDTH, STAGES,
        )  # fmt: skip


@triton.jit
def merge_parts(
    item_out,
    item_sum,
    own_out,
    own_sum,
    out,
    row_lane,
    ranges,
    lanes,
    WIDTH: tl.constexpr,
    PER_KV: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a row and query head."""
    take_turn(EARLY)
    row = tl.program_id(0)
    head = tl.program_id(1)
    lane = tl.load(row_lane + row)
    if lane < 0:
        return
    slot = lane // lanes
    first = tl.load(ranges + 2 * slot)
    count = tl.load(ranges + 2 * slot + 1)
    column = tl.arange(0, BLOCK_WIDTH)
    wide = column < WIDTH
    place = row * KV_HEADS * PER_KV + head
    member = (lane % lanes) * PER_KV + head % PER_KV
    top = tl.load(own_sum + place)
    mass = top * 0.0 + 1.0
    total = tl.load(own_out + place * WIDTH + column, mask=wide, other=0.0)
    for start in range(0, count, BLOCK_ITEMS):
        item = start + tl.arange(0, BLOCK_ITEMS)
        used = item < count
        at = ((first + item) * KV_HEADS + head // PER_KV) * lanes * PER_KV + member
        sums = tl.load(item_sum + at, mask=used, other=float("-inf"))
        parts = tl.load(
            item_out + at.to(tl.int64)[:, None] * WIDTH + column[None, :],
            mask=used[:, None] & wide[None, :],
            other=0.0,
        )
        new = tl.maximum(top, tl.max(sums, axis=0))
        weight = tl.exp2(sums - new)
        shrink = tl.exp2(top - new)
        mass = mass * shrink + tl.sum(weight, axis=0)
        total = total * shrink + tl.sum(parts * weight[:, None], axis=0)
        top = new
    tl.store(out + place * WIDTH + column, (total / mass).to(out.dtype.element_ty), mask=wide)


@triton.jit
def _prefix_item(
    query, shared, item_out, item_sum, lane_row, items, scale, item, kv, slots, lanes, room,
    WIDTH: tl.constexpr,
    PER_KV: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    slot = tl.load(items + 3 * item)
    begin = tl.load(items + 3 * item + 1)
    end = tl.load(items + 3 * item + 2)
    if end > 0:
        member = tl.program_id(2) * BLOCK_MEMBERS + tl.arange(0, BLOCK_MEMBERS)
        there = member < lanes * PER_KV
        row = tl.load(lane_row + slot * lanes + member // PER_KV, mask=there, other=-1)
        head = kv * PER_KV + member % PER_KV
        column = tl.arange(0, BLOCK_WIDTH)[None, :]
        q_at = query + (row * KV_HEADS * PER_KV + head)[:, None] * WIDTH + column
        q = tl.load(q_at, mask=(row >= 0)[:, None] & (column < WIDTH), other=0.0)
        keys = shared + (slot * KV_HEADS + kv).to(tl.int64) * room * WIDTH
        values = keys + (tl.zeros((), dtype=tl.int64) + slots) * KV_HEADS * room * WIDTH
        log_sum, mixed = _over_keys(
            q, keys, values, begin, end, scale,
            WIDTH, BLOCK_MEMBERS, BLOCK_KEYS, BLOCK_WIDTH, STAGES,
        )  # fmt: skip
        place = (item * KV_HEADS + kv) * lanes * PER_KV + member
        tl.store(item_sum + place, log_sum, mask=there)
        to = item_out + place.to(tl.int64)[:, None] * WIDTH + column
        tl.store(to, mixed, mask=there[:, None] & (column < WIDTH))


@triton.jit
def _own_keys(
    query, private, own_out, own_sum, row_lane, lane_tokens, scale, row, kv, slots, lanes, room,
    WIDTH: tl.constexpr,
    PER_KV: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    lane = tl.load(row_lane + row)
    if lane >= 0:
        tokens = tl.minimum(tl.load(lane_tokens + lane) + 1, room)
        head = tl.arange(0, BLOCK_HEADS)
        column = tl.arange(0, BLOCK_WIDTH)[None, :]
        place = (row * KV_HEADS + kv) * PER_KV + head
        at = place[:, None] * WIDTH + column
        seen = (head < PER_KV)[:, None] & (column < WIDTH)
        q = tl.load(query + at, mask=seen, other=0.0)
        keys = private + (lane * KV_HEADS + kv).to(tl.int64) * room * WIDTH
        values = keys + (tl.zeros((), dtype=tl.int64) + slots) * lanes * KV_HEADS * room * WIDTH
        log_sum, mixed = _over_keys(
            q, keys, values, 0, tokens, scale,
            WIDTH, BLOCK_HEADS, BLOCK_KEYS, BLOCK_WIDTH, STAGES,
        )  # fmt: skip
        tl.store(own_sum + place, log_sum, mask=head < PER_KV)
        tl.store(own_out + at, mixed, mask=seen)


@triton.jit
def _over_keys(
    q, keys, values, begin, end, scale,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Log-sums [rows], base 2, and mixed values [rows, D] of one head's keys begin to end."""
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    top = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    total = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), dtype=tl.float32)
    for first in tl.range(begin, end, BLOCK_KEYS, num_stages=STAGES):
        key = first + tl.arange(0, BLOCK_KEYS)
        inside = key < end
        at = key[:, None] * WIDTH + column
        seen = inside[:, None] & (column < WIDTH)
        k = tl.load(keys + at, mask=seen, other=0.0)
        scores = tl.where(inside[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        new = tl.maximum(top, tl.max(scores, axis=1))
        weight = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(top - new)
        mass = mass * shrink + tl.sum(weight, axis=1)
        v = tl.load(values + at, mask=seen, other=0.0)
        total = tl.dot(weight.to(v.dtype), v, total * shrink[:, None])
        top = new
    return top + tl.log2(mass), total / mass[:, None]
