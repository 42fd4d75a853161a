"""A plan carried out by a rank that can read the memory of every training rank: no collectives.

The owner of the memory decides when: nothing may write training's tensors during `update`, and
nothing may read what is not an alias. What is written are the rank's own buffers and the gaps
between training's tensors on its GPU, which no other rank writes; never a tensor of training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.weights.placed import strided
from common.weights.resharding.buffers import locate_sources, own_in, target_tensors
from common.weights.resharding.executor import Refresh
from common.weights.resharding.regions import Buffer, copies

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from common.ids import WeightsVersion
    from common.layouts.plan import GpuSharing, SharingPlan
    from common.weights.resharding.regions import Region


class DirectResharding:
    """The rollout's weights of one rank.

    Attributes:
        targets: by name, tied tensors under each of their names: views of training's memory with
            the gaps in it, or of the rank's own. They stay where they are.
    """

    def __init__(
        self,
        plan: SharingPlan,
        sharing: GpuSharing,
        sources: Mapping[int, Mapping[str, Tensor]],
        own: Tensor,
    ) -> None:
        """Args:
        plan: one in which no two ranks of the rollout gather into the same memory.
        sharing: the rank's part of it.
        sources: of every rank of training that the plan has the rank read, by that rank: its
            tensors by name, of one dtype, on one device. Of a tied tensor one name is enough. Those
            of the rank on its GPU are views of writable memory, if the plan gathers there.
        own: [own_elements(sharing)] or more, of that dtype, for what is rebuilt.
        Raises: MissingWeight naming every tensor that a rank lacks; LayoutMismatch for one that
            does not lie as the plan says.
        """
        replica = sharing.train_replica
        held = {one.train_rank: one for one in plan.gpus if one.train_replica == replica}
        shared = {rank: locate_sources(held[rank], given) for rank, given in sources.items()}
        buffers = shared[sharing.train_rank] | own_in(sharing, own)
        self.targets = target_tensors(sharing, buffers)
        self._copies = [
            (
                to.buffer.own is None,
                strided(buffers[to.buffer], to.view),
                strided(shared[rank][source.buffer], source.view),
            )
            for rank, to, source in _moves(sharing, held)
        ]
        self._alias_bytes = sharing.alias_bytes

    def update(self, version: WeightsVersion) -> Refresh:
        """Bring what is not an alias to the version that training's memory has now.

        If it fails, what is not an alias is undefined.
        """
        moved_bytes = {True: 0, False: 0}
        for in_place, target, source in self._copies:
            target.copy_(source)
            moved_bytes[in_place] += target.nbytes
        return Refresh(
            version=version,
            alias_bytes=self._alias_bytes,
            gather_bytes=moved_bytes[True],
            rebuild_bytes=moved_bytes[False],
            collectives=0,
        )


def _moves(
    sharing: GpuSharing, held: Mapping[int, GpuSharing]
) -> Iterator[tuple[int, Region, Region]]:
    """Rank of training, target and source of each piece."""
    for number, cluster in enumerate(sharing.clusters):
        for layer in range(cluster.train[0].count):
            for tensor, one in enumerate(cluster.rollout):
                for move in one.moves:
                    rank = sharing.train_rank if move.source is None else move.source
                    holder = held[rank].clusters[number]
                    for to, source in copies(one, tensor, move, holder, Buffer(number, layer)):
                        yield rank, to, source
