"""Attention of the split pass by fused kernels for 16-bit dtypes.

A response row attends to the prefix without a mask and to its own responses causally: two calls
of ready kernels, merged by their log-sums. Each part's backward, given the merged result and the
merged log-sum, gives exactly its part of the gradients; so no key is copied and no mask exists.

Shapes: P = prefix tokens, T = tokens of all responses of a group in one row, G = responses,
H = query heads, K = key/value heads, D = head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from common.vlm.cuda.attention_merge import merge

if TYPE_CHECKING:
    from collections.abc import Sequence

Library = Literal["flash", "cudnn"]
"""Which kernels attend where there is no packing. cuDNN's are the fastest, after a plan for each
shape has been made, which takes longer than many uses of it."""

_LONG_TOKENS = 2048
"""Prefixes from here on spend enough time in attention for plans to pay."""
_PLANNED_TOKENS = 256
"""Long prefixes are extended to multiples of this, so that there are few shapes to plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """Where the responses of one row begin and end.

    Attributes:
        bounds: [G' + 1] int32 on the device, first 0, then the end of each non-empty response.
        longest: tokens of the longest one.
    """

    bounds: Tensor
    longest: int


class FusedAttention:
    """Implements `common.vlm.attention.AttentionBackend` for bfloat16 and float16 on CUDA."""

    def __init__(self, *, prefix: Library | None = None, response: Library = "flash") -> None:
        """Choose kernels.

        Args:
            prefix: for the prefix's causal attention; by its length if not given.
            response: for the responses' attention to the prefix. Their lengths are new in every
                group, which a library with a plan for each shape is slow at.
        """
        self._prefix: Library | None = prefix
        self._response: Library = response

    def prefix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `AttentionBackend.prefix`.

        The kernels follow from the length alone, so that every process gets the same bits.
        """
        if self._prefix is not None:
            return dense_attention(query, key, value, causal=True, library=self._prefix)
        tokens = query.shape[1]
        if tokens < _LONG_TOKENS:
            return dense_attention(query, key, value, causal=True, library="flash")
        missing = -tokens % _PLANNED_TOKENS
        # no token sees the ones behind it, so what is added at the end needs no mask
        longer = [_extended(states, missing) for states in (query, key, value)]
        out = dense_attention(longer[0], longer[1], longer[2], causal=True, library="cudnn")
        return out[:, :tokens]

    def plan(self, prefix_tokens: int, lengths_G: Sequence[int], device: torch.device) -> PackedRow:
        """See `AttentionBackend.plan`."""
        del prefix_tokens
        bounds = [0]
        for length in lengths_G:
            if length:
                bounds.append(bounds[-1] + length)
        return PackedRow(
            bounds=torch.tensor(bounds, dtype=torch.int32, device=device), longest=max(lengths_G)
        )

    def responses(
        self,
        query: Tensor,
        prefix: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        plan: PackedRow,
    ) -> Tensor:
        """See `AttentionBackend.responses`."""
        return _Responses.apply(query, *prefix, *own, plan, self._response)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, library: Library
) -> Tensor:
    """Attention of one sequence.

    Args:
        query: [H, T, D]; key and value: [K, P, D]; any strides of rows and heads.
        causal: whether row t sees the first t + 1 keys only.
        library: which kernels.
    Returns: [H, T, D]; differentiable.
    """
    return _Dense.apply(query, key, value, causal, library)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, plan: PackedRow) -> Tensor:
    """Attention of each sequence of a row to all of itself, without a mask.

    Args:
        query, key, value: [H, S, D].
        plan: the sequences.
    Returns: [H, S, D]; differentiable.
    """
    return _Packed.apply(query, key, value, plan)


def _extended(states: Tensor, tokens: int) -> Tensor:
    """[heads, P + tokens, D]: zeros at the end, heads side by side in memory."""
    if not tokens:
        return states
    return torch.nn.functional.pad(states.transpose(0, 1), (0, 0, 0, 0, 0, tokens)).transpose(0, 1)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, library: Library
    ) -> Tensor:
        part = _dense_forward(query, key, value, causal, library)
        ctx.save_for_backward(query, key, value, part.out, part.log_sum)
        ctx.causal, ctx.backend, ctx.state = causal, library, part.state
        return part.out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum = ctx.saved_tensors
        gradients = _dense_backward(
            gradient, (query, key, value), (out, log_sum), ctx.causal, ctx.backend, ctx.state
        )
        return *gradients, None, None


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: PackedRow) -> Tensor:
        part = _packed_forward(query, key, value, plan, causal=False)
        ctx.save_for_backward(query, key, value, part.out, part.log_sum)
        ctx.plan, ctx.state = plan, part.state
        return part.out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum = ctx.saved_tensors
        gradients = _packed_backward(
            gradient, (query, key, value), (out, log_sum), ctx.plan, ctx.state, causal=False
        )
        return *gradients, None


class _Responses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        prefix_key: Tensor,
        prefix_value: Tensor,
        own_key: Tensor,
        own_value: Tensor,
        plan: PackedRow,
        library: Library,
    ) -> Tensor:
        own = _packed_forward(query, own_key, own_value, plan, causal=True)
        out, total, rest = own.out, own.log_sum, None
        if prefix_key.shape[1]:
            rest = _dense_forward(query, prefix_key, prefix_value, False, library)
            out, total = merge(own.out, own.log_sum, rest.out, rest.log_sum)
        ctx.save_for_backward(query, prefix_key, prefix_value, own_key, own_value, out, total)
        ctx.plan, ctx.backend = plan, library
        ctx.own_state, ctx.rest_state = own.state, rest and rest.state
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, prefix_key, prefix_value, own_key, own_value, out, total = ctx.saved_tensors
        grad_query, grad_own_key, grad_own_value = _packed_backward(
            gradient,
            (query, own_key, own_value),
            (out, total),
            ctx.plan,
            ctx.own_state,
            causal=True,
        )
        grad_key = grad_value = None
        if prefix_key.shape[1]:
            more, grad_key, grad_value = _dense_backward(
                gradient,
                (query, prefix_key, prefix_value),
                (out, total),
                False,
                ctx.backend,
                ctx.rest_state,
            )
            grad_query = grad_query.add_(more)
        return grad_query, grad_key, grad_value, grad_own_key, grad_own_value, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Attention over some of the keys.

    Attributes:
        out: [H, T, D].
        log_sum: [H, T] float32, natural logarithm of the sum of exponentials.
        state: what the backward kernel wants to see again.
    """

    out: Tensor
    log_sum: Tensor
    state: tuple[Tensor, Tensor]


def _packed_forward(
    query: Tensor, key: Tensor, value: Tensor, plan: PackedRow, *, causal: bool
) -> Part:
    out, log_sum, state, unused, _ = torch.ops.aten._flash_attention_forward(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        plan.bounds,
        plan.bounds,
        plan.longest,
        plan.longest,
        0.0,
        causal,
        False,
    )
    log_sum = log_sum.view(query.shape[:2])
    return Part(out=out.transpose(0, 1), log_sum=log_sum, state=(state, unused))


def _packed_backward(
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    result: tuple[Tensor, Tensor],
    plan: PackedRow,
    state: tuple[Tensor, Tensor],
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = inputs
    gradients = torch.ops.aten._flash_attention_backward(
        gradient.transpose(0, 1),
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        result[0].transpose(0, 1),
        result[1],
        plan.bounds,
        plan.bounds,
        plan.longest,
        plan.longest,
        0.0,
        causal,
        *state,
    )
    return tuple(part.transpose(0, 1) for part in gradients)


def _dense_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, library: Library
) -> Part:
    batch = (query[None], key[None], value[None])
    if library == "cudnn":
        result = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *batch, None, True, 0.0, causal, False
        )
    else:
        result = torch.ops.aten._scaled_dot_product_flash_attention(*batch, 0.0, causal, False)
    state = (result[6], result[7])
    return Part(out=result[0][0], log_sum=result[1].view(query.shape[:2]), state=state)


def _dense_backward(
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    result: tuple[Tensor, Tensor],
    causal: bool,
    library: Library,
    state: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (tensor[None] for tensor in inputs)
    out, log_sum = result[0][None], result[1][None]
    sizes = (query.shape[2], key.shape[2])
    if library == "cudnn":
        gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            gradient[None],
            query,
            key,
            value,
            out,
            log_sum[..., None],
            *state,
            None,
            None,
            None,
            *sizes,
            0.0,
            causal,
        )
    else:
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient[None],
            query,
            key,
            value,
            out,
            log_sum,
            None,
            None,
            *sizes,
            0.0,
            causal,
            *state,
        )
    return tuple(part[0] for part in gradients[:3])
