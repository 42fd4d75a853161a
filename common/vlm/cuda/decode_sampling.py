"""Sampling of one token a row on the device, and the lanes' state after it.

Shapes: R = rows, C = vocabulary, c = chunks of it, B = slots, S = lanes, N = most new tokens.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: ANN001, ANN202 - Triton types the arguments of its kernels
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from common.vlm.cuda.early import launch_options, take_turn

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 4096
"""Columns of one chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """State of all lanes of all slots, on the device; B * S lanes.

    Attributes:
        state: [4, B * S] int32: `token`, `tokens`, `finished` and the bits of `logprob`.
        token: [B * S] int32, what the lane is fed next.
        tokens: [B * S] int32, how many it was fed.
        position: [B * S] int32, position of its first token.
        finished: [B * S] int32, 1 after its last token.
        logprob: [B * S] float32, of its newest token.
        uniforms: [B * S, N] float64.
        recorded: [B * S, N] int32, the tokens to take if they are not sampled.
        chosen: [B * S, N] int32.
        logprobs: [B * S, N] float32.
    """

    state: Tensor
    token: Tensor
    tokens: Tensor
    position: Tensor
    finished: Tensor
    logprob: Tensor
    uniforms: Tensor
    recorded: Tensor
    chosen: Tensor
    logprobs: Tensor

    @classmethod
    def make(cls, *, lanes: int, new_tokens: int, device: torch.device) -> Lanes:
        """All zero."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        state = zeros(4, lanes)
        return cls(
            state=state,
            token=state[0],
            tokens=state[1],
            position=zeros(lanes),
            finished=state[2],
            logprob=state[3].view(torch.float32),
            uniforms=zeros(lanes, new_tokens, dtype=torch.float64),
            recorded=zeros(lanes, new_tokens),
            chosen=zeros(lanes, new_tokens),
            logprobs=zeros(lanes, new_tokens, dtype=torch.float32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How tokens are chosen; the same for all rows.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        forced: whether the recorded tokens are taken.
        stops: [n] int32 tokens after which a lane is finished.
        suppressed: [m] int32 tokens of probability 0.
        limits: [B * S] int32, most tokens of each lane.
    """

    temperature: float
    forced: bool
    stops: Tensor
    suppressed: Tensor
    limits: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFacts:
    """Of each row's chunks of the vocabulary; each [R, c].

    Attributes:
        top: float32, the largest scaled logit.
        mass: float32, sum of exponentials relative to it.
        best: int32, its lowest column.
    """

    top: Tensor
    mass: Tensor
    best: Tensor

    @classmethod
    def make(cls, *, rows: int, vocabulary: int, device: torch.device) -> ChunkFacts:
        """Allocate."""
        shape = (rows, triton.cdiv(vocabulary, CHUNK))
        return cls(
            top=torch.empty(shape, dtype=torch.float32, device=device),
            mass=torch.empty(shape, dtype=torch.float32, device=device),
            best=torch.empty(shape, dtype=torch.int32, device=device),
        )


def choose(
    logits: Tensor,
    row_lane: Tensor,
    lanes: Lanes,
    choice: Choice,
    facts: ChunkFacts,
    *,
    early: bool = False,
) -> None:
    """Choose each row's next token and advance its lane.

    A token is the first whose cumulative weight exceeds uniform x total. A finished lane, and a
    row that is not used, changes nothing.

    Args:
        logits: [R, C].
        row_lane: [R] int32.
        lanes: read and changed.
        choice: how.
        facts: scratch for as many rows.
        early: see `common.vlm.cuda.early`.
    """
    rows, columns = logits.shape
    chunks = facts.top.shape[1]
    options = {"EARLY": early, **launch_options(early=early)}
    scale = 1.0 if choice.temperature == 0 else choice.temperature
    _scan[(rows, chunks)](
        logits,
        row_lane,
        choice.suppressed,
        facts.top,
        facts.mass,
        facts.best,
        columns,
        scale,
        SUPPRESSED=choice.suppressed.shape[0],
        CHUNK_COLUMNS=CHUNK,
        num_warps=8,
        **options,
    )
    _pick[(rows,)](
        logits,
        row_lane,
        choice.suppressed,
        choice.stops,
        choice.limits,
        facts.top,
        facts.mass,
        facts.best,
        lanes.token,
        lanes.tokens,
        lanes.finished,
        lanes.logprob,
        lanes.uniforms,
        lanes.recorded,
        lanes.chosen,
        lanes.logprobs,
        columns,
        chunks,
        lanes.chosen.shape[1],
        scale,
        GREEDY=choice.temperature == 0,
        FORCED=choice.forced,
        SUPPRESSED=choice.suppressed.shape[0],
        STOPS=choice.stops.shape[0],
        CHUNK_COLUMNS=CHUNK,
        BLOCK_CHUNKS=triton.next_power_of_2(chunks),
        num_warps=8,
        **options,
    )


@triton.jit
def _scaled(logits, row, column, columns, suppressed, scale, SUPPRESSED: tl.constexpr):
    at = logits + row.to(tl.int64) * columns + column
    x = tl.load(at, mask=column < columns, other=float("-inf")).to(tl.float32) / scale
    for number in tl.static_range(SUPPRESSED):
        x = tl.where(column == tl.load(suppressed + number), float("-inf"), x)
    return x


@triton.jit
def _scan(
    logits,
    row_lane,
    suppressed,
    top,
    mass,
    best,
    columns,
    scale,
    SUPPRESSED: tl.constexpr,
    CHUNK_COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    take_turn(EARLY)
    row = tl.program_id(0)
    if tl.load(row_lane + row) < 0:
        return
    chunk = tl.program_id(1)
    column = chunk * CHUNK_COLUMNS + tl.arange(0, CHUNK_COLUMNS)
    x = _scaled(logits, row, column, columns, suppressed, scale, SUPPRESSED)
    high = tl.max(x, axis=0)
    calm = tl.where(high == float("-inf"), 0.0, high)
    to = row * tl.num_programs(1) + chunk
    tl.store(top + to, high)
    tl.store(mass + to, tl.sum(tl.exp(x - calm), axis=0))
    tl.store(best + to, tl.min(tl.where(x == high, column, columns - 1), axis=0))


@triton.jit
def _drawn(
    logits, row, target, weights, chunk, high, columns, suppressed, scale,
    SUPPRESSED: tl.constexpr, CHUNK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The first token whose cumulative weight exceeds the target."""
    sums = tl.cumsum(weights, axis=0)
    # rounding may leave no chunk above the target: then the last one of any weight
    last = tl.max(tl.where(weights > 0, chunk, 0), axis=0)
    found = tl.minimum(tl.sum((sums <= target).to(tl.int32), axis=0), last)
    before = tl.sum(tl.where(chunk < found, weights, 0.0), axis=0)
    column = found * CHUNK_COLUMNS + tl.arange(0, CHUNK_COLUMNS)
    x = _scaled(logits, row, column, columns, suppressed, scale, SUPPRESSED)
    inner = tl.exp(x - high)
    inner_sums = before + tl.cumsum(inner, axis=0)
    end = tl.max(tl.where(inner > 0, column, 0), axis=0)
    first = found * CHUNK_COLUMNS + tl.sum((inner_sums <= target).to(tl.int32), axis=0)
    # rounding may also lead to a column of weight 0 or past the end
    able = (inner > 0) & (column >= first)
    return tl.min(tl.where(able, column, end), axis=0)


@triton.jit
def _pick(
    logits, row_lane, suppressed, stops, limits, top, mass, best,
    lane_token, lane_tokens, lane_finished, lane_logprob, uniforms, recorded, chosen, logprobs,
    columns, chunks, most, scale,
    GREEDY: tl.constexpr,
    FORCED: tl.constexpr,
    SUPPRESSED: tl.constexpr,
    STOPS: tl.constexpr,
    CHUNK_COLUMNS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    row = tl.program_id(0)
    lane = tl.load(row_lane + row)
    if lane < 0:
        return
    if tl.load(lane_finished + lane) != 0:
        return
    number = tl.load(lane_tokens + lane)
    place = lane.to(tl.int64) * most + number
    chunk = tl.arange(0, BLOCK_CHUNKS)
    there = chunk < chunks
    tops = tl.load(top + row * chunks + chunk, mask=there, other=float("-inf"))
    masses = tl.load(mass + row * chunks + chunk, mask=there, other=0.0)
    high = tl.max(tops, axis=0)
    weights = masses * tl.exp(tops - high)
    total = tl.sum(weights, axis=0)
    if FORCED:
        token = tl.load(recorded + place)
    elif GREEDY:
        bests = tl.load(best + row * chunks + chunk, mask=there, other=columns - 1)
        token = tl.min(tl.where(tops == high, bests, columns - 1), axis=0)
    else:
        target = tl.load(uniforms + place).to(tl.float32) * total
        token = _drawn(
            logits, row, target, weights, chunk, high, columns, suppressed, scale,
            SUPPRESSED, CHUNK_COLUMNS,
        )  # fmt: skip
    logit = tl.load(logits + row.to(tl.int64) * columns + token).to(tl.float32) / scale
    for which in tl.static_range(SUPPRESSED):
        logit = tl.where(token == tl.load(suppressed + which), float("-inf"), logit)
    over = number + 1 >= tl.load(limits + lane)
    if not FORCED:
        for which in tl.static_range(STOPS):
            over = over | (token == tl.load(stops + which))
    logprob = logit - high - tl.log(total)
    tl.store(chosen + place, token)
    tl.store(logprobs + place, logprob)
    tl.store(lane_token + lane, token)
    tl.store(lane_tokens + lane, number + 1)
    tl.store(lane_logprob + lane, logprob)
    tl.store(lane_finished + lane, over.to(tl.int32))
