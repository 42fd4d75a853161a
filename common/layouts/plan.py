"""Which memory two layouts of one model share on every GPU. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from common.errors import InvalidArgument
from common.layouts.sharing import Cluster, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from common.layouts.sharing import ClusterSharing, TensorSharing
    from common.layouts.tensors import Layout, RankTensor


@dataclass(frozen=True)
class GpuSharing:
    """One GPU's ranks and what they share.

    Attributes:
        train_rank: rank inside its training replica.
        train_replica: whose memory it is that the rollout reads here.
        rollout_rank: rank inside its rollout replica.
        rollout_replica: counted over all GPUs; one that is not there has no tensors.
        element_bytes: of one element.
    """

    gpu: int
    train_rank: int
    train_replica: int
    rollout_rank: int
    rollout_replica: int
    clusters: tuple[ClusterSharing, ...]
    element_bytes: int

    @cached_property
    def alias_bytes(self) -> int:
        """What the rollout reads where training wrote it."""
        return self._rollout_bytes(lambda one: one.alias_elements)

    @cached_property
    def gather_bytes(self) -> int:
        """What is collected after an update into buffers shared with training."""
        return self._rollout_bytes(lambda one: one.moved_elements if one.kind is Kind.GATHER else 0)

    @cached_property
    def rebuild_bytes(self) -> int:
        """Buffers of the rollout's own."""
        return self._rollout_bytes(lambda one: one.tensor.numel if one.kind is Kind.REBUILD else 0)

    @cached_property
    def rebuild_copied_bytes(self) -> int:
        """What is copied into them after an update: all but their padding."""
        return self._rollout_bytes(
            lambda one: one.moved_elements if one.kind is Kind.REBUILD else 0
        )

    @cached_property
    def full_second_copy_bytes(self) -> int:
        """The rollout's whole shard: what it would take if nothing were shared."""
        return self._rollout_bytes(lambda one: one.tensor.numel)

    @cached_property
    def train_bytes(self) -> int:
        """The training shard."""
        return self.element_bytes * sum(
            tensor.numel * tensor.count for one in self.clusters for tensor in one.train
        )

    @cached_property
    def gap_bytes(self) -> int:
        """Memory in buffers shared with training beyond the training shard."""
        return self.element_bytes * sum(
            one.gap_elements * one.train[0].count for one in self.clusters
        )

    @cached_property
    def extra_bytes(self) -> int:
        """All memory for the rollout's weights beyond the training shard."""
        return self.element_bytes * sum(
            one.extra_elements * one.train[0].count for one in self.clusters
        )

    @cached_property
    def scratch_bytes(self) -> int:
        """Most that is held while one tensor is collected."""
        return self.element_bytes * max(
            (tensor.scratch_elements for one in self.clusters for tensor in one.rollout), default=0
        )

    def _rollout_bytes(self, elements: Callable[[TensorSharing], int]) -> int:
        return self.element_bytes * sum(
            elements(tensor) * tensor.tensor.count
            for one in self.clusters
            for tensor in one.rollout
        )


@dataclass(frozen=True)
class SharingPlan:
    """What all GPUs share.

    Attributes:
        plain_alias_bytes: of all GPUs, had the rollout's ranks the order of the GPUs.
    """

    train: Layout
    rollout: Layout
    gpus: tuple[GpuSharing, ...]
    plain_alias_bytes: int


class Station(NamedTuple):
    """Who is on a GPU; see `GpuSharing`."""

    gpu: int
    train_rank: int
    train_replica: int
    rollout_rank: int
    rollout_replica: int


def plan_sharing(
    train: Layout,
    rollout: Layout,
    *,
    element_bytes: int,
    gpus: int | None = None,
    shared: bool = True,
    train_replicas: int | None = None,
    rollout_replicas: int | None = None,
) -> SharingPlan:
    """Place the rollout's ranks so that the most bytes alias, and say what every GPU shares.

    GPU g has training rank ``g % train.degree``. Replicas of both lie inside blocks of the least
    common multiple of the degrees. Where several of the rollout's ranks share the memory of one
    rank of training, nothing is gathered in place there: one gap cannot be the place of each.

    Args:
        element_bytes: of one element of every tensor.
        gpus: of the whole run; by default as few blocks as have all replicas.
        shared: if not, nothing is shared: every rank of the rollout, in the plain order, has a
            second copy, all of it rebuilt.
        train_replicas: so many have memory; GPUs of further ones share theirs, in turn. None: all.
        rollout_replicas: so many are there; GPUs of further ones have training only. None: all.
    Raises: InvalidArgument if `gpus` is no multiple of a block.
    """
    block = math.lcm(train.degree, rollout.degree)
    if gpus is None:
        ranks = train.degree * (train_replicas or 1), rollout.degree * (rollout_replicas or 1)
        gpus = block * math.ceil(max(ranks) / block)
    if gpus < 1 or gpus % block:
        raise InvalidArgument(
            f"gpus = {gpus}: with TP {train.degree} in training and TP {rollout.degree} in the "
            f"rollout legal are multiples of {block}"
        )
    joined = clusters(train, rollout)
    if shared:
        alias_bytes = element_bytes * _alias_elements(joined, train.degree, rollout.degree)
    else:
        alias_bytes = np.zeros((train.degree, rollout.degree), dtype=np.int64)
    slots = _best_slots(alias_bytes, block)
    stations: list[Station] = []
    for gpu in range(gpus):
        place = slots[gpu % block] + gpu // block * block
        replica = gpu // train.degree
        if train_replicas is not None:
            replica %= train_replicas
        stations.append(
            Station(
                gpu, gpu % train.degree, replica, place % rollout.degree, place // rollout.degree
            )
        )
    there = {
        one
        for one in stations
        if rollout_replicas is None or one.rollout_replica < rollout_replicas
    }
    clusters_of = _shared(joined, stations, there) if shared else _apart(joined, stations, there)
    made = [
        GpuSharing(*one, found, element_bytes)
        for one, found in zip(stations, clusters_of, strict=True)
    ]
    plain = sum(
        int(alias_bytes[gpu % train.degree, gpu % rollout.degree])
        for gpu in range(gpus)
        if rollout_replicas is None or gpu // rollout.degree < rollout_replicas
    )
    return SharingPlan(train, rollout, tuple(made), plain)


def _alias_elements(joined: Sequence[Cluster], train: int, rollout: int) -> NDArray[np.int64]:
    """What every pair of ranks could alias on one GPU. Returns: [train, rollout], all layers."""
    total = np.zeros((train, rollout), dtype=np.int64)
    for cluster in joined:
        # ranks that hold the same, as of tensors that are not cut, are looked at once
        made: dict[tuple[int, int], int] = {}
        for pair in np.ndindex(train, rollout):
            key = (
                cluster.train.index(cluster.train[pair[0]]),
                cluster.rollout.index(cluster.rollout[pair[1]]),
            )
            if key not in made:
                tensors = cluster.best(*key).rollout if cluster.overlaps(*key) else ()
                made[key] = sum(one.alias_elements * one.tensor.count for one in tensors)
            total[pair] += made[key]
    return total


def _best_slots(alias_bytes: NDArray[np.int64], block: int) -> list[int]:
    """A place in the rollout for each GPU of a block; places count ranks, replica by replica.

    Of equally good orders it is one near the plain order.
    """
    train, rollout = alias_bytes.shape
    places = np.arange(block)
    benefit = alias_bytes[np.ix_(places % train, places % rollout)].astype(np.float64)
    _, slots = linear_sum_assignment(benefit * (block + 1) + np.eye(block), maximize=True)
    return [int(slot) for slot in slots]


def _shared(
    joined: Sequence[Cluster], stations: Sequence[Station], there: Collection[Station]
) -> Iterator[tuple[ClusterSharing, ...]]:
    """What each GPU's ranks share.

    Args: there: the GPUs that have a rank of the rollout.
    """
    beside: dict[tuple[int, int], list[int]] = {}
    for one in there:
        beside.setdefault((one.train_rank, one.train_replica), []).append(one.rollout_rank)
    groups: dict[tuple[int, bool], set[int]] = {}
    for (train_rank, _), ranks in beside.items():
        groups.setdefault((train_rank, len(ranks) > 1), set()).update(ranks)
    together = {
        (rank, packed): [cluster.together(rank, sorted(ranks), packed=packed) for cluster in joined]
        for (rank, packed), ranks in groups.items()
    }
    for one in stations:
        ranks = beside.get((one.train_rank, one.train_replica), [])
        if not ranks:
            yield tuple(cluster.alone(one.train_rank) for cluster in joined)
            continue
        found = together[one.train_rank, len(ranks) > 1]
        if one in there:
            yield tuple(sharing[one.rollout_rank] for sharing in found)
        else:
            yield tuple(replace(sharing[ranks[0]], rollout=()) for sharing in found)


def _apart(
    joined: Sequence[Cluster], stations: Sequence[Station], there: Collection[Station]
) -> Iterator[tuple[ClusterSharing, ...]]:
    """As `_shared`, with nothing shared."""
    for one in stations:
        if one in there:
            pair = one.train_rank, one.rollout_rank
            yield tuple(cluster.apart(*pair) for cluster in joined)
        else:
            yield tuple(cluster.alone(one.train_rank) for cluster in joined)


def clusters(train: Layout, rollout: Layout) -> list[Cluster]:
    """The tensors of both layouts, grouped by the logical tensors that they have in common.

    Raises: InvalidArgument naming the logical tensors that only one of them has.
    """
    names = [
        {part.tensor.name for one in layout.ranks[0] for part in one.parts}
        for layout in (train, rollout)
    ]
    if names[0] != names[1]:
        raise InvalidArgument(
            f"layouts of different models: only one has {', '.join(sorted(names[0] ^ names[1]))}"
        )
    groups: list[set[str]] = []
    for tensor in (*train.ranks[0], *rollout.ranks[0]):
        joined = {part.tensor.name for part in tensor.parts}
        for group in [group for group in groups if group & joined]:
            groups.remove(group)
            joined |= group
        groups.append(joined)
    return [
        Cluster(
            train=_of_group(train, group),
            rollout=_of_group(rollout, group),
            train_in_blocks=train.in_blocks,
            rollout_in_blocks=rollout.in_blocks,
        )
        for group in groups
    ]


def _of_group(layout: Layout, group: set[str]) -> tuple[tuple[RankTensor, ...], ...]:
    return tuple(
        tuple(one for one in rank if one.parts[0].tensor.name in group) for rank in layout.ranks
    )
