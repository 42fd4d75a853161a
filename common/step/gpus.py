"""Which GPU each rank of a node computes on, where training and rollout share them.

GPU g has rank g of training, over all of its replicas. Where one degree is a multiple of the other,
the rollout's ranks are where most of their weights alias training's, which the plans of
`common.layouts.plan` work out for any degrees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.ids import Service

if TYPE_CHECKING:
    from common.ids import Participant
    from common.step.partners import Partners


def rollout_place(partners: Partners, replica: int) -> int:
    """Where a replica of the rollout is, among as many as fill training's GPUs: spread evenly."""
    training = partners.count(Service.LEARNER) * partners.replica_count(Service.LEARNER)
    places = max(1, training // partners.count(Service.ROLLOUT))
    return replica * places // partners.replica_count(Service.ROLLOUT)


def shared_gpu(partners: Partners, one: Participant) -> int:
    """The GPU of a process that computes, at degrees of which one is a multiple of the other."""
    if one.service is not Service.ROLLOUT:
        return one.rank
    train, rollout = partners.count(Service.LEARNER), partners.count(Service.ROLLOUT)
    place, rank = rollout_place(partners, partners.replica(one)), one.rank % rollout
    if train >= rollout:
        replicas = train // rollout
        block, replica = divmod(place, replicas)
        return block * train + rank * replicas + replica
    parts = rollout // train
    return place * rollout + rank % parts * train + rank // parts
