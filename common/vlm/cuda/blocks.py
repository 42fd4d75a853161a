"""The two halves of a transformer block around its attention, each one autograd node.

A node keeps what matrix products need and recomputes the rest in its backward: of a decoder layer
stay its input, queries, keys and values, the attention's result, the residual sum, and the MLP's
two projections. Weight gradients go straight to their accumulators.

On several ranks the heads and the intermediate width are the rank's own. Four sums over the ranks
make hidden states and their gradients complete, all of [S, h] in the compute dtype: forward after
the output and after the down projection, backward before each of the two norms.

Shapes: S = tokens, h = hidden width, H = query heads, K = key/value heads, D = head width,
i = intermediate width, n = heads times D.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from common.vlm.cuda.activations import (
    gated_silu,
    gated_silu_backward,
    rotate_back,
    rotate_in_place,
)
from common.vlm.cuda.gradients import (
    shared_gradients,
    stacked,
    vector_gradients,
    weight_gradients,
)
from common.vlm.cuda.norms import add_rms_norm, rms_norm, rms_norm_backward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.vlm.parallel.group import RankGroup

_ROW_ALIGNMENT = 64
"""An MLP's inner width is rounded up to this many elements: matrix products of rows that do not
start at 16-byte boundaries take a slower path."""


class NormProject(torch.autograd.Function):
    """RMS norm, projections to heads, and the rotary turn of all but the values."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        eps: float,
        head_counts: tuple[int, ...],
        group: RankGroup | None,
        kv_parts: int | None,
        norm: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        """See `project_heads`."""
        weights, biases = _halves(parameters)
        normed = rms_norm(hidden, norm, eps)
        bias = stacked(biases) if biases else None
        heads = sum(head_counts)
        flat = F.linear(normed, stacked(weights), bias)
        states = flat.view(hidden.shape[0], heads, flat.shape[1] // heads)
        rotate_in_place(states, heads - head_counts[-1], cos, sin)
        ctx.save_for_backward(hidden, cos, sin)
        ctx.eps, ctx.head_counts, ctx.group, ctx.kv_parts = eps, head_counts, group, kv_parts
        ctx.norm, ctx.weights, ctx.biases = norm, weights, biases
        return tuple(part.transpose(0, 1) for part in states.split(head_counts, dim=1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the hidden states, and of parameters without an accumulator."""
        hidden, cos, sin = ctx.saved_tensors
        counts = ctx.head_counts
        rows, heads, width = hidden.shape[0], sum(counts), gradients[0].shape[-1]
        packed = torch.empty((rows, heads, width), dtype=hidden.dtype, device=hidden.device)
        parts = packed.split(counts, dim=1)
        for gradient, part in zip(gradients[:-1], parts[:-1], strict=True):
            rotate_back(gradient, part, cos, sin)
        rotate_back(gradients[-1], parts[-1], None, None)
        flat = packed.view(rows, heads * width)
        grad_normed = flat @ stacked(ctx.weights)
        if ctx.group is None:
            grad_hidden, grad_norm, normed = rms_norm_backward(
                grad_normed, hidden, ctx.norm, ctx.eps, None
            )
            results = _projection_gradients(ctx.weights, ctx.biases, flat, normed)
        else:
            summed = ctx.group.begin_sum(grad_normed)
            # normed once more, so that the weights' products run beside the sum
            normed = rms_norm(hidden, ctx.norm, ctx.eps)
            own = len(ctx.weights) - (0 if ctx.kv_parts is None else 2)
            results = _projection_gradients(ctx.weights[:own], ctx.biases[:own], flat, normed)
            summed.wait()
            grad_hidden, grad_norm, _ = rms_norm_backward(
                grad_normed, hidden, ctx.norm, ctx.eps, None
            )
            if ctx.kv_parts is not None:
                of_weights, of_biases = shared_gradients(
                    ctx.weights[own:],
                    ctx.biases[own:],
                    flat[:, sum(counts[:own]) * width :],
                    normed,
                    group=ctx.group,
                    parts=ctx.kv_parts,
                )
                results = [*results[:own], *of_weights, *results[own:], *of_biases]
        results = [*vector_gradients([ctx.norm], grad_norm), *results]
        return grad_hidden, *[None] * 6, *results


class ResidualMlp(torch.autograd.Function):
    """Output projection, residual, RMS norm, gated MLP, residual."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        merged: Tensor,
        eps: float,
        group: RankGroup | None,
        norm: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        """See `residual_mlp`."""
        (out_w, *inner_w, down_w), biases = _halves(parameters)
        out_b, down_b = (biases[0], biases[-1]) if biases else (None, None)
        total, normed = add_rms_norm(
            hidden, _complete_product(merged, out_w, out_b, group), norm, eps
        )
        joint = F.linear(normed, *_joint(inner_w, biases[1:-1]))
        gate, up = joint.chunk(2, dim=1)
        product = torch.empty_like(gate, memory_format=torch.contiguous_format)
        gated_silu(gate, up, product)
        result = _complete_product(product, _widened(down_w), down_b, group).add_(total)
        ctx.save_for_backward(merged, total, joint)
        ctx.eps, ctx.group, ctx.norm, ctx.biases = eps, group, norm, biases
        ctx.out_w, ctx.inner_w, ctx.down_w = out_w, inner_w, down_w
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of both inputs, and of parameters without an accumulator."""
        merged, total, joint = ctx.saved_tensors
        gradient = gradient.contiguous()
        width = ctx.down_w.shape[1]
        grad_product = gradient @ _widened(ctx.down_w)
        product, grad_joint = torch.empty_like(grad_product), torch.empty_like(joint)
        gate, up = joint.chunk(2, dim=1)
        grad_gate, grad_up = grad_joint.chunk(2, dim=1)
        gated_silu_backward(grad_product, gate, up, grad_gate, grad_up, product)
        grad_normed = grad_joint @ _joint(ctx.inner_w, ())[0]
        summed = None if ctx.group is None else ctx.group.begin_sum(grad_normed)
        grad_down_w = weight_gradients([ctx.down_w], gradient, product[:, :width])
        if summed is not None:
            summed.wait()
        grad_total, grad_norm, normed = rms_norm_backward(
            grad_normed, total, ctx.norm, ctx.eps, gradient
        )
        del grad_normed
        grad_gate, grad_up = grad_gate[:, :width], grad_up[:, :width]
        if product.shape[1] == width:
            grad_inner_w = weight_gradients(ctx.inner_w, grad_joint, normed)
        else:
            grad_inner_w = [
                *weight_gradients(ctx.inner_w[:1], grad_gate, normed),
                *weight_gradients(ctx.inner_w[1:], grad_up, normed),
            ]
        grad_out_w = weight_gradients([ctx.out_w], grad_total, merged)
        results = vector_gradients([ctx.norm], grad_norm)
        results += [*grad_out_w, *grad_inner_w, *grad_down_w]
        for bias, of in zip(ctx.biases, (grad_total, grad_gate, grad_up, gradient), strict=False):
            results += vector_gradients([bias], of.sum(0, dtype=torch.float32))
        return grad_total, grad_total @ ctx.out_w, None, None, *results


def project_heads(
    hidden: Tensor,
    angles: tuple[Tensor, Tensor],
    *,
    norm: Any,
    projections: Sequence[Any],
    head_counts: tuple[int, ...],
    group: RankGroup | None = None,
    kv_parts: int | None = None,
) -> tuple[Tensor, ...]:
    """Normed hidden states projected to heads; all but the last part are turned.

    Args:
        hidden: [S, h] contiguous.
        angles: cosines and sines, each [S, D].
        norm: the norm's module.
        projections: linear modules whose outputs one after the other are the heads, all with or
            all without a bias.
        head_counts: heads of each part.
        group: the ranks that have the other heads; None for none.
        kv_parts: how many distinct ones of the last two projections there are, where several ranks
            have the same ones; else None.
    Returns: a view [heads, S, D] for each part, all of one row-major buffer.
    """
    cos, sin = angles
    parts = NormProject.apply(
        hidden,
        cos.contiguous(),
        sin.contiguous(),
        norm.variance_epsilon,
        head_counts,
        group,
        kv_parts,
        norm.weight,
        *_parameters(projections),
    )
    return tuple(parts)


def residual_mlp(
    hidden: Tensor,
    merged: Tensor,
    *,
    norm: Any,
    projections: Sequence[Any],
    group: RankGroup | None = None,
) -> Any:
    """What follows attention in a block.

    Args:
        hidden: [S, h]; what entered the block.
        merged: [S, n]; the heads' results side by side.
        norm: the second norm's module.
        projections: output, gate, up and down projection, all or none with a bias.
        group: the ranks that have the other heads and inner columns; None for none.
    Returns: [S, h].
    """
    return ResidualMlp.apply(
        hidden, merged, norm.variance_epsilon, group, norm.weight, *_parameters(projections)
    )


def _projection_gradients(
    weights: Sequence[Tensor], biases: Sequence[Tensor], gradient: Tensor, inputs: Tensor
) -> list[Tensor | None]:
    """Gradients of the first stacked projections, if any; weights before biases."""
    if not weights:
        return []
    rows = sum(weight.shape[0] for weight in weights)
    gradient = gradient[:, :rows]
    results = weight_gradients(weights, gradient, inputs)
    if biases:
        results += vector_gradients(biases, gradient.sum(0, dtype=torch.float32))
    return results


def _complete_product(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, group: RankGroup | None
) -> Tensor:
    """inputs @ weight^T + bias, of which each rank of the group has some input columns."""
    if group is None:
        return F.linear(inputs, weight, bias)
    total = group.sum(F.linear(inputs, weight))
    return total if bias is None else total.add_(bias)


def _parameters(projections: Sequence[Any]) -> list[Tensor]:
    """All weights, then all biases if there are any."""
    weights = [projection.weight for projection in projections]
    return weights + [p.bias for p in projections if p.bias is not None]


def _halves(parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and biases of `_parameters`."""
    weights = [parameter for parameter in parameters if parameter.dim() == 2]
    return weights, list(parameters[len(weights) :])


def _joint(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Gate and up projection as one, each with zero rows up to an aligned width.

    Returns: weight [2 * aligned i, h] and bias [2 * aligned i] or None.
    """
    width, inputs = weights[0].shape
    aligned = _aligned(width)
    if aligned == width:
        return stacked(weights), stacked(biases) if biases else None
    weight = weights[0].new_zeros((2, aligned, inputs))
    bias = weights[0].new_zeros((2, aligned)) if biases else None
    for number in range(2):
        weight[number, :width] = weights[number]
        if bias is not None:
            bias[number, :width] = biases[number]
    return weight.view(-1, inputs), None if bias is None else bias.view(-1)


def _widened(weight: Tensor) -> Tensor:
    """A weight [h, i] with zero columns up to an aligned width; a copy costs less than odd rows."""
    missing = _aligned(weight.shape[1]) - weight.shape[1]
    return F.pad(weight, (0, missing)) if missing else weight


def _aligned(width: int) -> int:
    return -(-width // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
