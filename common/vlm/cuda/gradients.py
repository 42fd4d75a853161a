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
        vectors: parameters [n_i] that one after the other make the n entries; None for none.
        gradient: [n] float32.
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
