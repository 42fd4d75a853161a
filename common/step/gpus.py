"""Which GPU each rank of a node computes on, where training and rollout share them.

GPU g has rank g of training, over all of its replicas. Where one degree is a multiple of the other,
the rollout's ranks are where most of their weights alias training's, which the plans of
`common.layouts.plan` work out for any degrees. On a CPU there may be more ranks of the rollout than
of training: further ones are as if training began anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.ids import Service

if TYPE_CHECKING:
    from common.ids import Participant
    from common.step.partners import Partners


def shared_gpu(partners: Partners, one: Participant) -> int:
    """The GPU of a process that computes, at degrees of which one is a multiple of the other."""
    if one.service is not Service.ROLLOUT:
        return one.rank
    train, rollout = partners.count(Service.LEARNER), partners.count(Service.ROLLOUT)
    replica, rank = divmod(one.rank, rollout)
    if train >= rollout:
        replicas = train // rollout
        block, number = divmod(replica, replicas)
        return block * train + rank * replicas + number
    parts = rollout // train
    return replica * rollout + rank % parts * train + rank // parts


def rank_beside(partners: Partners, gpu: int) -> int:
    """The number of training's rank on a GPU."""
    return gpu % len(partners.everyone(Service.LEARNER))
