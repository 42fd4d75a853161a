"""Modules whose parallel form is none of the library's styles.

Shapes: C = vocabulary, c = rows of this rank, h = hidden width, n = ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class VocabularyEmbedding(nn.Embedding):
    """Embeddings of which this rank has a range of rows.

    DTensor's own backward of such a table is a gradient of all C rows on every rank; this one's has
    c rows.
    """

    def forward(self, ids: Tensor) -> Tensor:
        """[..., h] of ids [...], complete on every rank."""
        placed: Any = self.weight
        mesh, weight = placed.device_mesh, placed.to_local()
        rows = weight.shape[0]
        first = mesh.get_local_rank() * rows
        local = ids - first
        absent = (local < 0) | (local >= rows)
        padding = None if self.padding_idx is None else self.padding_idx - first
        own = F.embedding(
            local.masked_fill(absent, 0),
            weight,
            padding_idx=padding if padding is not None and 0 <= padding < rows else None,
        )
        own = own.masked_fill(absent[..., None], 0)
        partial = DTensor.from_local(own, mesh, [Partial()], run_check=False)
        return partial.redistribute(placements=[Replicate()]).to_local()


class SharedProjection(nn.Linear):
    """A projection to heads of which several ranks hold the same ones.

    Each of those ranks has a part of the gradient, from the queries that it has; the parameters'
    gradient is their sum, on all of them.
    """

    part: int
    """Which of the distinct parts this rank holds."""
    parts: int
    """Number of distinct parts."""

    def forward(self, states: Tensor) -> Tensor:
        """As a linear layer."""
        bias = None if self.bias is None else self._shared(self.bias)
        return F.linear(states, self._shared(self.weight), bias)

    def _shared(self, parameter: Tensor) -> Tensor:
        return _SumGradient.apply(parameter, self.part, self.parts)


class _SumGradient(torch.autograd.Function):
    """The identity; its gradient is summed over the ranks that hold the same part."""

    @staticmethod
    def forward(ctx: Any, parameter: Any, part: int, parts: int) -> Tensor:
        ctx.part, ctx.parts = part, parts
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Tensor | None, ...]:
        # one sum over all ranks, each in its part's place: no communicator a set of sharing ranks
        mesh, own = gradient.device_mesh, gradient.to_local()
        precise = torch.float64 if own.dtype == torch.float64 else torch.float32
        places = own.new_zeros((ctx.parts, *own.shape), dtype=precise)
        places[ctx.part] = own
        total = all_reduce(places, "sum", mesh.get_group())[ctx.part]
        return DTensor.from_local(total, mesh, gradient.placements, run_check=False), None, None


def share_heads(projection: nn.Linear, mesh: DeviceMesh, parts: int) -> SharedProjection:
    """The projection with one part a rank, of which there are fewer than ranks.

    Args:
        projection: on the meta device.
        mesh: of n ranks, a multiple of `parts`.
        parts: distinct parts.
    Returns: on the meta device; n parts under each other, the equal ones beside each other.
    """
    rows = projection.out_features // parts
    shared = SharedProjection(
        projection.in_features,
        rows * mesh.size(),
        bias=projection.bias is not None,
        device="meta",
        dtype=projection.weight.dtype,
    )
    shared.part = mesh.get_local_rank() * parts // mesh.size()
    shared.parts = parts
    return shared


def sharded(local: Tensor, mesh: DeviceMesh, axis: int) -> DTensor:
    """A tensor of which each rank has an equal part along an axis."""
    return DTensor.from_local(local, mesh, [Shard(axis)], run_check=False)


def group_sum(values: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over the ranks, in a new tensor."""
    return all_reduce(values, "sum", mesh.get_group())


def group_maximum(values: Tensor, mesh: DeviceMesh) -> Tensor:
    """The maximum over the ranks, in a new tensor."""
    return all_reduce(values, "max", mesh.get_group())
