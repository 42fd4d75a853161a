"""A controller whose node has several ranks of each service."""

from __future__ import annotations

import asyncio

import pytest

from common.ids import Epoch, Participant, RunId, Service
from common.registry.client import Registry
from rollplex import RunState
from services.controller.config import ControllerConfig
from services.controller.fleet import Fleet, PeerFailed
from tests.integration.controller.conftest import DEPLOYMENT
from tests.integration.controller.peers import Node

pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]

RUN = RunId("run-1")
FIRST, SECOND = (Participant(service=Service.LEARNER, rank=rank) for rank in range(2))


@pytest.fixture
async def pair(redis_server):
    """Two ranks of each service that computes."""
    node = Node(url=redis_server.url, deployment=DEPLOYMENT, ranks=2)
    await node.start()
    yield node
    await node.stop()


@pytest.fixture
async def fleet(redis_server, pair):
    registry = Registry(redis_server.url, DEPLOYMENT, ttl_s=2.0)
    fleet = Fleet(registry, pair.participants, ControllerConfig())
    await fleet.entries()
    yield fleet
    await fleet.close()
    await registry.close()


@pytest.mark.parametrize("fails", [FIRST, SECOND], ids=str)
async def test_no_call_is_left_when_a_checkpoint_has_failed(fleet, pair, fails):
    waits = SECOND if fails is FIRST else FIRST
    begun, ended = asyncio.Event(), asyncio.Event()

    async def fail():
        await begun.wait()
        raise RuntimeError("the disk is full")

    async def wait_in_vain():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    pair.workers[fails].save, pair.workers[waits].save = fail, wait_in_vain
    with pytest.raises(PeerFailed, match=f"checkpoint of {fails}: .*the disk is full"):
        await fleet.save_checkpoint(RUN, Epoch(1))
    async with asyncio.timeout(10):
        await ended.wait()


async def test_a_run_made_for_one_rank_that_several_cannot_do_ends(controller, queue_run):
    run_id = await queue_run(on_error="drop_group")
    controller.config.write_text(f"train_tp = 2\nrollout_tp = 2\n{controller.config.read_text()}")
    controller.start()
    async with await controller.client() as client, asyncio.timeout(30):
        run = await client.wait_run(run_id)
    assert run.state is RunState.FAILED
    assert 'reward.on_error = "drop_group" on a node with train_tp = 2' in run.reason
