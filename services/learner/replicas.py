"""ZeRO-1: each replica updates a share of the weights, from the gradients of all of them.

Shapes: Et trainable elements of this rank, those that its part of the model has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from common.weights.cuts import shares

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from common.weights.placed import PlacedRange


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
        self._shares = shares(elements, mesh.size())
        self.own = self._shares[mesh.get_local_rank()]

    def reduce(self, gradients: torch.Tensor) -> torch.Tensor:
        """Make this rank's share the sum of all replicas'.

        Args: gradients: [Et]; changed in place, and of no use outside the share.
        Returns: the share, a view.
        """
        parts = [gradients[share] for share in self._shares]
        own = parts[self._mesh.get_local_rank()]
        dist.reduce_scatter(own, parts, group=self._mesh.get_group())
        return own

    def exchange(self, weights: PlacedRange) -> None:
        """Have the shares of the others in the trainable weights, where they lie.

        Memory: as much again where anything lies between them.
        """
        if weights.whole is not None:
            self.gather(weights.whole)
            return
        flat = weights.new_zeros()
        weights.copy_to(flat)
        self.gather(flat)
        weights.copy_(flat)

    def gather(self, flat: torch.Tensor) -> None:
        """Fill every share with what its rank has there.

        Args: flat: [Et]; this rank's share is read, the others are written in place.
        """
        length = self._shares[0].stop
        parts = [flat[share][:length] for share in self._shares]
        group = self._mesh.get_group()
        dist.all_gather(parts, parts[self._mesh.get_local_rank()], group=group)
        # Gloo gathers parts of equal sizes; the last share may have a few elements more.
        rest = flat[length * len(parts) :]
        if rest.numel():
            dist.broadcast(rest, group=group, group_src=len(parts) - 1)
