"""ZeRO-1: each replica updates a share of the weights, from the gradients of all of them.

Shapes: Et trainable elements of this rank, those that its part of the model has; d replicas; n
elements of every share but the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from common.vlm.parallel.group import RankGroup
from common.weights.cuts import shares

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


class Replicas:
    """The ranks of all replicas that have the same part of the model.

    All of them call the same methods in the same order.

    Attributes:
        own: of the trainable elements, the share that this rank updates.
    """

    def __init__(self, elements: int, mesh: DeviceMesh) -> None:
        """Args:
        elements: Et.
        mesh: of those ranks.
        """
        self._mesh = mesh
        self._group = RankGroup(mesh)
        ranges = shares(elements, mesh.size())
        self._length = ranges[0].stop
        self.own = ranges[mesh.get_local_rank()]

    def reduce(self, gradients: torch.Tensor) -> torch.Tensor:
        """Make this rank's share the sum of all replicas'.

        Args: gradients: [Et]; changed in place, and of no use outside the share.
        Returns: the share, a view.
        """
        even, rest = self._cut(gradients)
        self._group.sum_own(even)
        if rest.numel():
            self._group.sum(rest)
        return gradients[self.own]

    def gather(self, flat: torch.Tensor) -> None:
        """Fill every share with what its rank has there.

        Args: flat: [Et]; this rank's share is read, the others are written in place.
        """
        even, rest = self._cut(flat)
        self._group.gather(even[self._group.rank], even)
        if rest.numel():
            group, last = self._mesh.get_group(), self._group.size - 1
            dist.broadcast(rest, group=group, group_src=last)

    def _cut(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As [d, n], and what the last share has more: collectives of parts of one tensor, which
        have no buffer of their own for it, need equal ones.
        """
        even = self._length * self._group.size
        return flat[:even].view(self._group.size, self._length), flat[even:]
