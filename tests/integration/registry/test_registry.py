from __future__ import annotations

import asyncio
import os
import signal

import pytest

from common.errors import Stale, Unavailable
from common.ids import Incarnation, Participant, Service
from common.registry.client import Registry, ServiceEntry
from common.registry.connection import open_redis

pytestmark = pytest.mark.redis

LEARNER = Participant(service=Service.LEARNER)
ROLLOUT = Participant(service=Service.ROLLOUT, rank=1)


def entry(participant=LEARNER, incarnation="a", **values):
    return ServiceEntry(
        participant=participant,
        node="n1",
        pid=os.getpid(),
        grpc_address="127.0.0.1:1",
        http_address="127.0.0.1:2",
        incarnation=Incarnation(incarnation),
        **values,
    )


@pytest.fixture
async def registry(redis_server):
    registry = Registry(redis_server.url, "test", ttl_s=5, deadline_s=20)
    yield registry
    await registry.close()


async def test_registered_services_are_listed_and_found(registry):
    learner = await registry.register(entry(serving=True, phase="idle"))
    rollout = await registry.register(entry(ROLLOUT))
    assert (learner.epoch, rollout.epoch) == (1, 1)
    assert await registry.services() == [learner, rollout]
    assert await registry.find(LEARNER) == learner
    await registry.deregister(learner)
    await registry.deregister(learner)
    assert await registry.find(LEARNER) is None
    assert await registry.services() == [rollout]


async def test_deployments_on_one_server_do_not_see_each_other(registry, redis_server):
    other = Registry(redis_server.url, "other", deadline_s=20)
    await other.register(entry())
    assert await registry.services() == []
    await other.close()


async def test_registration_without_heartbeats_ends(redis_server):
    registry = Registry(redis_server.url, "test", ttl_s=0.1, deadline_s=20)
    registered = await registry.register(entry())
    async with asyncio.timeout(10):
        while await registry.find(LEARNER) is not None:  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.02)
    await registry.heartbeat(registered)
    assert await registry.find(LEARNER) == registered
    await registry.close()


async def test_newer_process_fences_the_older_one(registry):
    old = await registry.register(entry(incarnation="old"))
    new = await registry.register(entry(incarnation="new"))
    with pytest.raises(Stale, match=r"learner/0 .* epoch 1\) was replaced .* epoch 2"):
        await registry.heartbeat(old)
    await registry.deregister(old)
    assert await registry.find(LEARNER) == new


async def test_registration_comes_back_after_redis_lost_its_data(registry, redis_server):
    old = await registry.register(entry(incarnation="old"))
    new = await registry.register(entry(incarnation="new"))
    client = open_redis(redis_server.url)
    await client.flushall()
    await client.aclose()
    await registry.heartbeat(new)
    assert await registry.find(LEARNER) == new
    with pytest.raises(Stale):
        await registry.heartbeat(old)


async def test_heartbeat_survives_a_killed_redis(registry, redis_server):
    registered = await registry.register(entry())
    redis_server.stop(signal.SIGKILL)
    beat = asyncio.create_task(registry.heartbeat(registered))
    await asyncio.sleep(0.2)
    assert not beat.done()
    await redis_server.start()
    await asyncio.wait_for(beat, 20)
    assert await registry.find(LEARNER) == registered


async def test_a_cancelled_reader_always_ends(registry):
    async def read():
        while True:
            await registry.find(LEARNER)

    for number in range(200):
        reader = asyncio.create_task(read())
        # Another moment of the exchange each time.
        await asyncio.sleep(0.001 + number * 1e-5)
        reader.cancel()
        assert await asyncio.wait([reader], timeout=5) == ({reader}, set())


async def test_absent_redis_is_named_with_what_to_do(redis_server):
    registry = Registry(redis_server.url, "test", deadline_s=0.2)
    redis_server.stop()
    with pytest.raises(Unavailable, match=r"redis\.sock .*redis\.url") as caught:
        await registry.services()
    assert caught.value.retryable
    await registry.close()


async def test_wait_for_names_what_it_found_instead(registry):
    with pytest.raises(Unavailable, match=r"learner/0 .* is not registered"):
        await registry.wait_for(LEARNER, timeout_s=0)
    registered = await registry.register(entry(phase="loading"))
    with pytest.raises(Unavailable, match="phase 'loading'"):
        await registry.wait_for(LEARNER, timeout_s=0)
    waiting = asyncio.create_task(registry.wait_for(LEARNER, timeout_s=20))
    await registry.deregister(registered)
    serving = await registry.register(entry(serving=True))
    assert await waiting == serving
