"""What the ranks of training and those of the rollout share on one node. Needs no torch.

Every parameter lies by itself, and both sides read a matrix as one plain strided view. A rank of
training that one rank of the rollout shares memory with has room between its tensors for what the
latter gathers; one that several share memory with, or none, has its tensors one after the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.layouts.kinds import LayoutName
from common.layouts.model import layout_pair
from common.layouts.plan import plan_sharing

if TYPE_CHECKING:
    from common.layouts.plan import GpuSharing, SharingPlan
    from common.vlm.shape import ModelShape


def node_plan(
    shape: ModelShape,
    *,
    train_tp: int,
    rollout_tp: int,
    element_bytes: int,
    train_replicas: int = 1,
    rollout_replicas: int = 1,
) -> SharingPlan:
    """The plan of the services.

    Raises: InvalidArgument naming the degree and what is legal.
    """
    native = LayoutName.NATIVE
    train, rollout = (
        replace(layout, in_blocks=False)
        for layout in layout_pair(shape, (native, train_tp), (native, rollout_tp))
    )
    return plan_sharing(
        train,
        rollout,
        element_bytes=element_bytes,
        train_replicas=train_replicas,
        rollout_replicas=rollout_replicas,
    )


def rollout_sharing(plan: SharingPlan, rank: int, *, replica: int = 0) -> GpuSharing:
    """What a rank of a replica of the rollout shares with training."""
    wanted = (replica, rank)
    return next(one for one in plan.gpus if (one.rollout_replica, one.rollout_rank) == wanted)


def training_sharing(plan: SharingPlan, rank: int, *, replica: int = 0) -> GpuSharing:
    """Where the tensors of a rank of a replica of training lie."""
    wanted = (replica, rank)
    return next(one for one in plan.gpus if (one.train_replica, one.train_rank) == wanted)


def gatherers(plan: SharingPlan, rank: int, *, replica: int = 0) -> tuple[int, ...]:
    """Of the rollout's ranks, counted over its replicas, those that gather into a training rank's
    memory: one at most."""
    return tuple(
        one.rollout_replica * plan.rollout.degree + one.rollout_rank
        for one in plan.gpus
        if (one.train_replica, one.train_rank) == (replica, rank) and one.gather_bytes
    )


def source_ranks(sharing: GpuSharing) -> tuple[int, ...]:
    """The ranks of training that a rank of the rollout reads; the one that it aliases first."""
    others = {
        move.source
        for cluster in sharing.clusters
        for tensor in cluster.rollout
        for move in tensor.moves
        if move.source is not None
    }
    return (sharing.train_rank, *sorted(others))
