"""An engine's reservation, on a real broker."""

from __future__ import annotations

import asyncio

import pytest

from common.tensors.errors import ArenaFull
from services.rollout.window_memory import WindowMemory
from tests.integration.broker.conftest import (
    ARENA_BYTES,
    ROLLOUT,
    broker,
    started,
)
from tests.integration.broker.test_client import RUN, allocate

__all__ = ["broker", "started"]

KEPT, WINDOW = ARENA_BYTES // 4, ARENA_BYTES // 2


def memory(client, **sizes):
    wanted = {"lasting_bytes": KEPT, "window_bytes": WINDOW} | sizes
    return WindowMemory(client, RUN, name="engine", **wanted)


async def reserved(broker) -> int:
    return sum(each.bytes for each in (await broker.ledger()).entries if each.name == "engine")


async def test_the_window_has_its_part_and_waits_for_it(broker):
    client = await broker.join(ROLLOUT)
    engine = memory(client)
    await engine.take(timeout_s=None)
    assert await reserved(broker) == KEPT + WINDOW
    await asyncio.to_thread(engine.release)
    engine.release()
    lease = await allocate(broker.clients[0], ROLLOUT, size_bytes=WINDOW)
    assert await reserved(broker) == KEPT
    waiting = asyncio.create_task(engine.take(timeout_s=30.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    lease.abandon("a test")
    await waiting
    await engine.take(timeout_s=None)
    assert await reserved(broker) == KEPT + WINDOW


async def test_an_end_of_the_wait_takes_nothing(broker):
    client, learner = await broker.join(ROLLOUT), broker.clients[0]
    engine = memory(client, lasting_bytes=0)
    lease = await allocate(learner, ROLLOUT, size_bytes=3 * WINDOW // 2)
    waiting = asyncio.create_task(engine.take(timeout_s=30.0))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    engine.release()
    lease.abandon("a test")
    await broker.settle(0)
    assert await reserved(broker) == 0
    await learner.reserve(RUN, "activations", ARENA_BYTES)
    with pytest.raises(ArenaFull, match="reservation engine"):
        await engine.take(timeout_s=None)


async def test_an_engine_without_processes_reserves_nothing(broker):
    client = await broker.join(ROLLOUT)
    engine = memory(client, lasting_bytes=0, window_bytes=0)
    await engine.take(timeout_s=None)
    engine.release()
    assert await reserved(broker) == 0
