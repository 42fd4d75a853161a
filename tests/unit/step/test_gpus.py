"""Ranks are on the GPUs on which the most of their weights alias."""

from __future__ import annotations

import pytest

from common.ids import WORKERS, Service
from common.layouts.node import node_plan, rollout_sharing
from common.step.gpus import rank_beside, shared_gpu
from common.step.partners import Partners
from common.vlm.parallel.model import config_shape
from common.vlm.tiny import tiny_config

SHAPE = config_shape(tiny_config())
FILLED = [
    ((1, 1), (1, 1)),
    ((2, 1), (1, 2)),
    ((4, 1), (2, 2)),
    ((4, 1), (1, 4)),
    ((2, 2), (1, 4)),
    ((2, 2), (2, 2)),
    ((1, 2), (2, 1)),
    ((2, 2), (4, 1)),
    ((1, 4), (4, 1)),
    ((1, 4), (2, 2)),
]
"""Degree and replicas of training, and of the rollout on the same GPUs."""


def of_node(train, rollout):
    degrees, replicas = dict.fromkeys(WORKERS, train[0]), dict.fromkeys(WORKERS, train[1])
    return Partners(
        degrees | {Service.ROLLOUT: rollout[0]}, replicas | {Service.ROLLOUT: rollout[1]}
    )


def rollout_gpus(partners):
    return [shared_gpu(partners, one) for one in partners.everyone(Service.ROLLOUT)]


@pytest.mark.parametrize(("train", "rollout"), FILLED, ids=str)
def test_the_rollouts_ranks_are_where_a_plan_puts_them(train, rollout):
    plan = node_plan(SHAPE, train_tp=train[0], rollout_tp=rollout[0], element_bytes=4)
    planned = [
        rollout_sharing(plan, rank, replica=replica)
        for replica in range(rollout[1])
        for rank in range(rollout[0])
    ]
    partners = of_node(train, rollout)
    assert rollout_gpus(partners) == [one.gpu for one in planned]
    assert [one.rollout_replica for one in planned] == [
        partners.replica(one) for one in partners.everyone(Service.ROLLOUT)
    ]


@pytest.mark.parametrize(("train", "rollout"), FILLED, ids=str)
def test_each_rank_of_either_side_has_a_gpu(train, rollout):
    partners = of_node(train, rollout)
    every = list(range(train[0] * train[1]))
    assert sorted(rollout_gpus(partners)) == every
    for service in (Service.LEARNER, Service.REFERENCE, Service.PREFIX_ENCODER):
        assert [shared_gpu(partners, one) for one in partners.everyone(service)] == every


@pytest.mark.parametrize(
    ("train", "rollout", "gpus"),
    [
        ((4, 1), (2, 2), [0, 2, 1, 3]),
        ((2, 1), (4, 1), [0, 2, 1, 3]),
        ((1, 4), (1, 2), [0, 1]),
    ],
    ids=str,
)
def test_the_gpus_are_those_that_the_text_names(train, rollout, gpus):
    assert rollout_gpus(of_node(train, rollout)) == gpus


@pytest.mark.parametrize(
    ("train", "rollout", "ranks"),
    [
        ((1, 2), (1, 4), [0, 1, 0, 1]),
        ((1, 1), (2, 2), [0, 0, 0, 0]),
        ((4, 1), (2, 2), [0, 2, 1, 3]),
    ],
    ids=str,
)
def test_ranks_without_a_gpu_are_beside_training_all_the_same(train, rollout, ranks):
    partners = of_node(train, rollout)
    assert [rank_beside(partners, gpu) for gpu in rollout_gpus(partners)] == ranks
