"""Attention of one decode step: all lanes of a group against its one prefix, and their own tokens.

The prefixes' keys are cut into items. One launch has a program for each item and one for each
row's own keys; a second one merges every row's parts by their log-sums.

Shapes: R = rows, B = slots, S = lanes of a slot, K = key/value heads, Q = query heads of each,
D = head width, Pc and Rc = capacities, I = items, M = S * Q.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton

from common.vlm.cuda.decode_attention_kernels import attend_parts, merge_parts
from common.vlm.cuda.early import launch_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_LOG2_E = 1.4426950408889634
_MERGED_ITEMS = 8
"""Items of one step of the merge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How the attention kernels are cut.

    Attributes:
        prefix_keys: keys of one step over a prefix.
        own_keys: keys of one step over a row's own tokens.
        stages: steps whose loads are in flight.
        warps: of one program.
    """

    prefix_keys: int = 64
    own_keys: int = 64
    stages: int = 3
    warps: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Where the parts leave their results, all float32; log-sums in base 2.

    Attributes:
        item_out: [I, K, M, D].
        item_sum: [I, K, M].
        own_out: [R, K * Q, D].
        own_sum: [R, K * Q].
    """

    item_out: Tensor
    item_sum: Tensor
    own_out: Tensor
    own_sum: Tensor

    @classmethod
    def make(
        cls, *, items: int, lanes: int, rows: int, kv_heads: int, per_kv: int, width: int,
        device: torch.device,
    ) -> Scratch:  # fmt: skip
        """Allocate for I items of S * Q members each, and R rows."""

        def make(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        members = (items, kv_heads, lanes * per_kv)
        heads = (rows, kv_heads * per_kv)
        return cls(
            item_out=make(*members, width),
            item_sum=make(*members),
            own_out=make(*heads, width),
            own_sum=make(*heads),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Which lanes the rows are, and where their keys are; all int32 on the device.

    Attributes:
        row_lane: [R], slot * S + lane of each row; -1 for a row that is not used.
        lane_row: [B * S], the row of each lane or -1.
        lane_tokens: [B * S], tokens in each lane before the new one.
        items: [3 * I] and ranges: [2 * B], as from `plan_items`.
    """

    row_lane: Tensor
    lane_row: Tensor
    lane_tokens: Tensor
    items: Tensor
    ranges: Tensor


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
    places: Places,
    scratch: Scratch,
    blocks: Blocks,
    early: bool = False,
) -> None:
    """Attention of R rows.

    Args:
        query: [R, K * Q, D], turned.
        shared: [2, B, K, Pc, D] of one layer.
        private: [2, B, S, K, Rc, D] of one layer, the rows' new tokens included.
        out: [R, K * Q, D]; written in the rows that are used.
        places: of the rows and their keys.
        scratch: for as many items and rows.
        blocks: how the kernels are cut.
        early: see `common.vlm.cuda.early`.
    """
    rows, heads, width = query.shape
    _, slots, lanes, kv_heads, room, _ = private.shape
    per_kv, items = heads // kv_heads, scratch.item_out.shape[0]
    block_members = min(64, max(16, triton.next_power_of_2(lanes * per_kv)))
    heads_shape = {"WIDTH": width, "PER_KV": per_kv, "KV_HEADS": kv_heads}
    options = {"EARLY": early, **launch_options(early=early)}
    attend_parts[(items + rows, kv_heads, triton.cdiv(lanes * per_kv, block_members))](
        query,
        shared,
        private,
        scratch.item_out,
        scratch.item_sum,
        scratch.own_out,
        scratch.own_sum,
        places.row_lane,
        places.lane_row,
        places.lane_tokens,
        places.items,
        width**-0.5 * _LOG2_E,
        items,
        slots,
        lanes,
        shared.shape[3],
        room,
        **heads_shape,
        BLOCK_MEMBERS=block_members,
        BLOCK_HEADS=max(16, triton.next_power_of_2(per_kv)),
        PREFIX_KEYS=blocks.prefix_keys,
        OWN_KEYS=blocks.own_keys,
        BLOCK_WIDTH=triton.next_power_of_2(width),
        STAGES=blocks.stages,
        num_warps=blocks.warps,
        **options,
    )
    merge_parts[(rows, heads)](
        scratch.item_out,
        scratch.item_sum,
        scratch.own_out,
        scratch.own_sum,
        out,
        places.row_lane,
        places.ranges,
        lanes,
        **heads_shape,
        BLOCK_ITEMS=_MERGED_ITEMS,
        BLOCK_WIDTH=triton.next_power_of_2(width),
        num_warps=1,
        **options,
    )
