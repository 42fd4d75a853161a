"""Weight gradients added straight into their accumulators.

Autograd would write each weight's gradient in the weights' dtype, read it again, and add it to
the float32 accumulator; here the matrix product itself adds, in float32.

Shapes: S = tokens, n = output width, k = input width.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.vlm.parallel.group import RankGroup


def adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """One view of several tensors that follow each other in one storage, stacked on axis 0.

    Returns: the view, without a graph; None if they do not lie like that.
    """
    first = tensors[0].detach()
    if len(tensors) == 1:
        return first if first.is_contiguous() else None
    expected = first.storage_offset()
    for tensor in tensors:
        if (
            not tensor.is_contiguous()
            or tensor.dtype != first.dtype
            or tensor.shape[1:] != first.shape[1:]
            or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or tensor.storage_offset() != expected
        ):
            return None
        expected += tensor.numel()
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors stacked on axis 0: a view where they are adjacent, else a copy."""
    view = adjacent(tensors)
    return torch.cat([tensor.detach() for tensor in tensors]) if view is None else view


def add_product(accumulator: Tensor, left: Tensor, right: Tensor) -> None:
    """accumulator += left @ right, in the accumulator's precision.

    Args:
        accumulator: [n, k]; rows may be strided.
        left: [n, S] and right: [S, k], both of one dtype.
    """
    if accumulator.dtype == left.dtype:
        accumulator.addmm_(left, right)
    elif left.is_cuda and accumulator.dtype == torch.float32 and _adds_wide(left.dtype):
        torch.addmm(accumulator, left, right, out_dtype=torch.float32, out=accumulator)
    else:
        accumulator.add_(left.to(accumulator.dtype) @ right.to(accumulator.dtype))


@lru_cache(maxsize=8)
def _adds_wide(dtype: torch.dtype) -> bool:
    """Whether this torch adds a product of `dtype` matrices to a float32 one in place."""
    ones = torch.ones((16, 16), dtype=dtype, device="cuda")
    total = torch.ones((16, 16), device="cuda")
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return bool((total == 17).all())


def weight_gradients(
    weights: Sequence[Tensor], gradient: Tensor, inputs: Tensor
) -> list[Tensor | None]:
    """Gradients of stacked weights [n, k]: added to their accumulators where they have one.

    Args:
        weights: parameters whose rows, one weight after the other, make the n outputs.
        gradient: [S, n] of the outputs.
        inputs: [S, k].
    Returns: for each weight None if added (or not needed), else the gradient for autograd to add.
    """
    left = gradient.t()
    if all(weight.requires_grad and weight.grad is not None for weight in weights):
        together = adjacent([weight.grad for weight in weights])  # type: ignore[misc]
        if together is not None:
            add_product(together, left, inputs)
            return [None] * len(weights)
    results: list[Tensor | None] = []
    start = 0
    for weight in weights:
        part = left[start : start + weight.shape[0]]
        start += weight.shape[0]
        if not weight.requires_grad:
            results.append(None)
        elif weight.grad is None:
            results.append(part @ inputs)
        else:
            add_product(weight.grad, part, inputs)
            results.append(None)
    return results


def vector_gradients(vectors: Sequence[Tensor | None], gradient: Tensor) -> list[Tensor | None]:
    """Gradients of biases or norm weights, added or returned as `weight_gradients` does.

    Args:
        vectors: parameters [n_i, ...] that one after the other make the n entries; None for none.
        gradient: [n, ...] float32.
    """
    results: list[Tensor | None] = []
    start = 0
    for vector in vectors:
        if vector is None:
            results.append(None)
            continue
        part = gradient[start : start + vector.shape[0]]
        start += vector.shape[0]
        if not vector.requires_grad:
            results.append(None)
        elif vector.grad is None:
            results.append(part.to(vector.dtype))
        else:
            vector.grad.add_(part)
            results.append(None)
    return results


def row_gradients(table: Tensor, index: Tensor, gradient: Tensor) -> Tensor | None:
    """Gradient of rows that were looked up in a table [C, k].

    Args:
        table: parameter.
        index: [S] int64 rows, any of them several times.
        gradient: [S, k].
    Returns: None if added (or not needed), else the gradient for autograd to add.
    """
    if not table.requires_grad:
        return None
    target = torch.zeros_like(table) if table.grad is None else table.grad
    # adding by sorted index is deterministic, unlike atomic additions
    target.index_put_((index,), gradient.to(target.dtype), accumulate=True)
    return target if table.grad is None else None


def shared_gradients(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    gradient: Tensor,
    inputs: Tensor,
    *,
    group: RankGroup,
    parts: int,
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of stacked projections, summed over the ranks that hold the same ones.

    Args:
        weights, biases: parameters [n_i, k] and [n_i], or no biases.
        gradient: [S, n] of the outputs, as far as this rank has them.
        inputs: [S, k].
        group: all ranks; those with equal projections follow each other.
        parts: how many distinct ones there are.
    Returns: as `weight_gradients`, of weights and of biases.
    """
    if not any(parameter.requires_grad for parameter in (*weights, *biases)):
        return [None] * len(weights), [None] * len(biases)
    rows, width = gradient.shape[1], inputs.shape[1]
    # one sum over all ranks, each in its part's place: no communicator a set of sharing ranks
    places = gradient.new_zeros((parts, rows * (width + bool(biases))), dtype=torch.float32)
    own = places[group.rank * parts // group.size]
    of_weights, of_biases = own[: rows * width].view(rows, width), own[rows * width :]
    add_product(of_weights, gradient.t(), inputs)
    if biases:
        of_biases.copy_(gradient.sum(0, dtype=torch.float32))
    group.sum(places)
    return vector_gradients(weights, of_weights), vector_gradients(biases, of_biases)
