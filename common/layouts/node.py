"""What the ranks of training and those of the rollout share on one node. Needs no torch.

Each rank of training has its tensors one after the other, every parameter by itself; both sides
read a matrix as one plain strided view.
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
    shape: ModelShape, *, train_tp: int, rollout_tp: int, element_bytes: int
) -> SharingPlan:
    """The plan of the services.

    Raises: InvalidArgument naming the degree and what is legal.
    """
    native = LayoutName.NATIVE
    train, rollout = (
        replace(layout, in_blocks=False)
        for layout in layout_pair(shape, (native, train_tp), (native, rollout_tp))
    )
    return plan_sharing(train, rollout, element_bytes=element_bytes, packed=True)


def rollout_sharing(plan: SharingPlan, rank: int, *, replica: int = 0) -> GpuSharing:
    """What a rank of a replica of the rollout shares with training on its GPU.

    Returns: with GPU and replica counted over all blocks; each is as the plan's one.
    """
    block, number = divmod(replica, len(plan.gpus) // plan.rollout.degree)
    wanted = (number, rank)
    found = next(one for one in plan.gpus if (one.rollout_replica, one.rollout_rank) == wanted)
    return replace(found, gpu=found.gpu + block * len(plan.gpus), rollout_replica=replica)


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
