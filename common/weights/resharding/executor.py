"""A plan carried out: the rollout's weights on one rank, refreshed after every update of training.

The rollout may read its tensors between two calls of `update`, on the stream that called it;
training writes its own between the readers' end and the next call.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from common.errors import InvalidArgument
from common.ids import WeightsVersion
from common.weights.resharding.buffers import (
    allocate_own,
    locate_sources,
    strided,
    target_tensors,
)
from common.weights.resharding.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from common.layouts.plan import SharingPlan
    from common.weights.resharding.regions import Buffer, Region
    from common.weights.resharding.schedule import Round

ROUND_BYTES = 512 << 20
"""Most that a rank sends or receives at a time, unless one tensor is larger."""
IN_FLIGHT = 2
"""Rounds whose collectives run at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refresh:
    """What an update did on this rank.

    Attributes:
        version: of the rollout's weights from now on.
        alias_bytes: read where training wrote them; nothing was moved.
        gather_bytes: brought into buffers shared with training.
        rebuild_bytes: brought into buffers of the rollout's own.
        collectives: calls of the group.
    """

    version: WeightsVersion
    alias_bytes: int
    gather_bytes: int
    rebuild_bytes: int
    collectives: int


class Resharding:
    """The rollout's weights of one rank.

    Attributes:
        targets: by name, tied tensors under each of their names; shapes and strides are those of
            the plan's views, with leading axes for blocks. They stay where they are.
        version: updates carried out; 0: what is not an alias is still zero.
    """

    def __init__(
        self,
        plan: SharingPlan,
        sources: Mapping[str, Tensor],
        group: dist.ProcessGroup,
        *,
        gpus: Sequence[int] | None = None,
        round_bytes: int = ROUND_BYTES,
    ) -> None:
        """Lay out the rollout's tensors. Every rank of the group does this with the same plan.

        Args:
            sources: training's tensors of this rank by name, laid out as `allocate_sources` does;
                one dtype, one device. Of a tied tensor one name is enough.
            group: one rank a GPU; its collectives are issued by `update` only. Nothing is sent yet.
            gpus: GPU of each rank, in the order of the ranks; all of the plan if not given. A
                training replica has to be whole.
            round_bytes: most that a rank sends or receives at a time, unless a tensor is larger.
                So much again is held twice while it is packed, at most for two rounds.
        Raises: MissingWeight naming every tensor that is absent; LayoutMismatch for one that does
            not lie as the plan says; InvalidArgument for GPUs that do not fit the group.
        """
        chosen = range(len(plan.gpus)) if gpus is None else gpus
        if len(chosen) != group.size():
            raise InvalidArgument(
                f"{len(chosen)} GPUs of a plan for {len(plan.gpus)}, and a group of "
                f"{group.size()} ranks; one rank carries out one GPU"
            )
        own = plan.gpus[chosen[group.rank()]]
        self._group = group
        buffers = locate_sources(own, sources)
        like = next(iter(buffers.values()))
        self._dtype, self._device = like.dtype, like.device
        buffers |= allocate_own(own, dtype=like.dtype, device=like.device)
        self.targets = target_tensors(own, buffers)
        self.version = WeightsVersion(0)
        schedule = Schedule(
            gpus=tuple(plan.gpus[gpu] for gpu in chosen),
            rank=group.rank(),
            train_degree=plan.train.degree,
            round_elements=max(1, round_bytes // own.element_bytes),
        )
        self._rounds = [_BoundRound(one, buffers) for one in schedule.rounds()]
        self._real_bytes = own.element_bytes * sum(
            part.real.numel * one.tensor.count
            for cluster in own.clusters
            for one in cluster.rollout
            for part in one.tensor.parts
            if part.real is not None
        )

    def update(self) -> Refresh:
        """Refresh what is not an alias from what training's tensors hold now.

        Every rank of the group calls it. Kernels that write training's tensors come before it on
        the current stream; kernels on that stream after it see the new weights. If it fails,
        what is not an alias is undefined, and the version stays.
        """
        gathered = rebuilt = collectives = 0
        running: deque[_Running] = deque()
        for one in self._rounds:
            if len(running) == IN_FLIGHT:
                running.popleft().finish()
            running.append(_Running(one, self._group, self._dtype, self._device))
            gathered += one.gather_bytes
            rebuilt += one.rebuild_bytes
            collectives += len(running[-1].works)
        while running:
            running.popleft().finish()
        self.version = WeightsVersion(self.version + 1)
        return Refresh(
            version=self.version,
            alias_bytes=self._real_bytes - gathered - rebuilt,
            gather_bytes=gathered,
            rebuild_bytes=rebuilt,
            collectives=collectives,
        )


class _BoundRound:
    """A round with tensors for its regions."""

    def __init__(self, plan: Round, buffers: Mapping[Buffer, Tensor]) -> None:
        self.gather_bytes = self.rebuild_bytes = 0
        self._buffers = buffers
        self.gather_targets = [self._bound(one.target).view(-1) for one in plan.gathers]
        self.gather_sources = [self._bound(one.source).view(-1) for one in plan.gathers]
        self.copies = [(self._bound(to), self._bound(source)) for to, source in plan.copies]
        self.sends = [self._bound(one) for peer in plan.sends for one in peer]
        self.receives = [self._bound(one) for peer in plan.receives for one in peer]
        self.send_sizes = [sum(one.elements for one in peer) for peer in plan.sends]
        self.receive_sizes = [sum(one.elements for one in peer) for peer in plan.receives]
        self.exchanges = plan.exchanges
        for gather, tensor in zip(plan.gathers, self.gather_targets, strict=True):
            kept = gather.source.elements if gather.in_place else 0
            self._count(gather.target, tensor.numel() - kept)
        for to, _ in plan.copies:
            self._count(to, to.elements)
        for peer in plan.receives:
            for one in peer:
                self._count(one, one.elements)

    def _bound(self, region: Region) -> Tensor:
        return strided(self._buffers[region.buffer], region.view)

    def _count(self, target: Region, elements: int) -> None:
        moved = elements * self._buffers[target.buffer].itemsize
        if target.buffer.own is None:
            self.gather_bytes += moved
        else:
            self.rebuild_bytes += moved


class _Running:
    """A round whose collectives have been issued."""

    def __init__(
        self,
        plan: _BoundRound,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._plan = plan
        self.works: list[dist.Work] = []
        self._sent = self._received = torch.empty(0, dtype=dtype, device=device)
        if plan.gather_targets:
            self.works.append(
                group.allgather_into_tensor_coalesced(plan.gather_targets, plan.gather_sources)
            )
        if plan.exchanges:
            self._sent = torch.empty(sum(plan.send_sizes), dtype=dtype, device=device)
            self._received = torch.empty(sum(plan.receive_sizes), dtype=dtype, device=device)
            for region, packed in zip(plan.sends, _pieces(self._sent, plan.sends), strict=True):
                packed.copy_(region)
            work = dist.all_to_all_single(
                self._received,
                self._sent,
                plan.receive_sizes,
                plan.send_sizes,
                group=group,
                async_op=True,
            )
            assert work is not None, "this process is a rank of the group"
            self.works.append(work)
        for target, source in plan.copies:
            target.copy_(source)

    def finish(self) -> None:
        """Wait for the collectives, put everything in its place."""
        for work in self.works:
            work.wait()
        receives = self._plan.receives
        for region, packed in zip(receives, _pieces(self._received, receives), strict=True):
            region.copy_(packed)


def _pieces(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A flat tensor cut into tensors of the shapes of others."""
    parts = flat.split([one.numel() for one in like])
    return [part.view(one.shape) for part, one in zip(parts, like, strict=True)]
