"""Collectives on plain tensors, for code that runs on a rank's own parts.

Shapes: n = ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

# Of other names before torch 2.13.
_gather_tensors = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_sum_parts = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RankGroup:
    """The ranks of a mesh of one dimension.

    Every rank has to call the same in the same order. On CUDA the results are there for what
    follows on the current stream; nothing waits for the device, so a CUDA graph can hold all of it
    once the same has run outside of one.

    Attributes:
        rank: this rank's place in the group.
        size: n.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.rank: int = mesh.get_local_rank()
        self.size: int = mesh.size()
        self._group = mesh.get_group()

    def sum(self, values: Tensor) -> Tensor:
        """Overwrite contiguous values by their sum over the ranks, in their dtype; return them."""
        dist.all_reduce(values, dist.ReduceOp.SUM, group=self._group)
        return values

    def begin_sum(self, values: Tensor) -> dist.Work:
        """As `sum`, beside what follows until `wait` of the result; no other collective before."""
        work = dist.all_reduce(values, dist.ReduceOp.SUM, group=self._group, async_op=True)
        assert work is not None, "only a process outside the group has nothing to wait for"
        return work

    def maximum(self, values: Tensor) -> Tensor:
        """Overwrite contiguous values by their maximum over the ranks; return them."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values

    def sum_own(self, values: Tensor) -> Tensor:
        """Overwrite this rank's row by its sum over the ranks; the others are of no use then.

        Args: values: [n, r, ...] contiguous.
        Returns: [r, ...], a view.
        """
        own = values[self.rank]
        _sum_parts(own, values.flatten(0, 1), dist.ReduceOp.SUM, group=self._group)
        return own

    def gather(self, own: Tensor, out: Tensor) -> None:
        """Write every rank's contiguous tensor.

        Args:
            own: [r, ...]; it may be this rank's row of `out`.
            out: [n, r, ...] contiguous; written in the order of the ranks.
        """
        _gather_tensors(out.flatten(0, 1), own, group=self._group)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRanks:
    """Over which ranks the parts of a model are split.

    Attributes:
        text: of the text model and the vocabulary.
        vision: of the tower; None if every rank runs all of it.
        kv_parts: distinct parts of the key and value projections if ranks share them, else None.
    """

    text: RankGroup
    vision: RankGroup | None
    kv_parts: int | None
