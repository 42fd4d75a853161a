"""Log-probabilities of chosen tokens over a large vocabulary, a part of the vocabulary at a time.

The logits are computed again in the backward. Every part of the output weight meets all rows at
once, so that its gradient is one product.

Shapes: T = tokens, h = hidden width, C = vocabulary, c = columns of one part.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: ANN001, ANN202 - Triton types the arguments of its kernels
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.vlm.cuda.gradients import add_product

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.vlm.parallel.group import RankGroup

LOGITS_BYTES = 1 << 28
"""Most bytes of logits alive at once."""

_BLOCK = 2048


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    temperature: float,
    suppressed: Tensor | None,
    group: RankGroup | None = None,
    logits_bytes: int = LOGITS_BYTES,
) -> Tensor:
    """Log-probability of each row's token.

    On several ranks a maximum of two numbers a row and a sum of one cross them forward, and
    backward a float32 sum of the gradient of `hidden`.

    Args:
        hidden: [T, h], normed, contiguous; equal on all ranks.
        weight: [C, h] of the output projection, which has no bias; on several ranks each one's
            range of the vocabulary.
        tokens: [T] int64.
        temperature: divides the logits; positive.
        suppressed: [n] int64 ids with probability 0, or None.
        group: the ranks that have the rest of the vocabulary; None for none.
        logits_bytes: most bytes of logits alive at once.
    Returns: [T] float32; differentiable in `hidden` and `weight`.
    """
    suppressed = tokens.new_empty(0) if suppressed is None else suppressed
    if group is not None:
        first = group.rank * weight.shape[0]
        tokens, suppressed = tokens - first, suppressed - first
    return _TokenLogprobs.apply(
        hidden, weight, tokens, temperature, suppressed, group, logits_bytes
    )


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        temperature: float,
        suppressed: Tensor,
        group: RankGroup | None,
        logits_bytes: int,
    ) -> Tensor:
        rows = hidden.shape[0]
        extremes = hidden.new_full((2, rows), float("-inf"), dtype=torch.float32)
        top, chosen = extremes
        total = torch.zeros_like(top)
        for start, part in _parts(weight, rows, logits_bytes):
            logits = hidden @ part.t()
            _statistics[(rows,)](
                logits,
                tokens,
                suppressed,
                top,
                total,
                chosen,
                start,
                part.shape[0],
                temperature,
                SUPPRESSED=suppressed.shape[0],
                BLOCK=_BLOCK,
                num_warps=8,
            )
        if group is not None:
            own_top = top.clone()
            group.maximum(extremes)
            group.sum(total.mul_((own_top - top).exp_()))
        log_sum = top + total.log()
        ctx.save_for_backward(hidden, tokens, suppressed, log_sum)
        ctx.weight, ctx.temperature, ctx.logits_bytes = weight, temperature, logits_bytes
        ctx.group = group
        return chosen - log_sum

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, tokens, suppressed, log_sum = ctx.saved_tensors
        rows = hidden.shape[0]
        weight = ctx.weight
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        fresh = None
        accumulator = weight.grad if weight.requires_grad else None
        if weight.requires_grad and accumulator is None:
            accumulator = fresh = torch.zeros_like(weight)
        for start, part in _parts(weight, rows, ctx.logits_bytes):
            logits = hidden @ part.t()
            _logit_gradients[(rows,)](
                logits,
                tokens,
                suppressed,
                log_sum,
                gradient.contiguous(),
                start,
                part.shape[0],
                ctx.temperature,
                SUPPRESSED=suppressed.shape[0],
                BLOCK=_BLOCK,
                num_warps=8,
            )
            add_product(grad_hidden, logits, part)
            if accumulator is not None:
                add_product(accumulator[start : start + part.shape[0]], logits.t(), hidden)
        if ctx.group is not None:
            ctx.group.sum(grad_hidden)
        return grad_hidden.to(hidden.dtype), fresh, *[None] * 5


def _parts(weight: Tensor, rows: int, logits_bytes: int) -> Iterator[tuple[int, Tensor]]:
    """First column and weight of each part; parts are about equal."""
    columns = weight.shape[0]
    most = max(_BLOCK, logits_bytes // (max(rows, 1) * weight.element_size()))
    count = -(-columns // most)
    width = -(-columns // (count * _BLOCK)) * _BLOCK
    flat = weight.detach()
    for start in range(0, columns, width):
        yield start, flat[start : start + width]


@triton.jit
def _statistics(
    logits,
    tokens,
    suppressed,
    top,
    total,
    chosen,
    start,
    columns,
    temperature,
    SUPPRESSED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row) - start
    high = tl.load(top + row)
    mass = tl.load(total + row)
    picked = tl.load(chosen + row)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + row * columns + column, mask=column < columns, other=float("-inf"))
        x = x.to(tl.float32) / temperature
        for number in tl.static_range(SUPPRESSED):
            x = tl.where(column + start == tl.load(suppressed + number), float("-inf"), x)
        new = tl.maximum(high, tl.max(x, axis=0))
        # a part may be suppressed as a whole
        base = tl.where(new == float("-inf"), 0.0, new)
        mass = mass * tl.exp(high - base) + tl.sum(tl.exp(x - base), axis=0)
        high = new
        picked = tl.maximum(picked, tl.max(tl.where(column == token, x, float("-inf")), axis=0))
    tl.store(top + row, high)
    tl.store(total + row, mass)
    tl.store(chosen + row, picked)


@triton.jit
def _logit_gradients(
    logits,
    tokens,
    suppressed,
    log_sum,
    gradient,
    start,
    columns,
    temperature,
    SUPPRESSED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row) - start
    shift = tl.load(log_sum + row)
    factor = tl.load(gradient + row) / temperature
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < columns
        at = logits + row * columns + column
        x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32) / temperature
        hit = tl.where(column == token, 1.0, 0.0)
        for number in tl.static_range(SUPPRESSED):
            out = column + start == tl.load(suppressed + number)
            x = tl.where(out, float("-inf"), x)
            hit = tl.where(out, 0.0, hit)
        d = factor * (hit - tl.exp(x - shift))
        tl.store(at, d.to(logits.dtype.element_ty), mask=inside)
