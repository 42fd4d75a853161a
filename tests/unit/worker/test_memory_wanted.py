"""What a worker does when a storage finds no room on its device."""

from __future__ import annotations

import asyncio
import threading

import pytest

from common.ids import WeightsVersion
from common.worker.device import WorkerDevice
from tests.integration.broker.test_spilling import full_lease, spilled, written

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def returns(monkeypatch):
    """Threads in which memory was given back."""
    threads = []
    monkeypatch.setattr(
        WorkerDevice, "give_back", lambda self: threads.append(threading.current_thread().name)
    )
    return threads


async def test_memory_is_given_back_between_two_jobs(worker, script, broker, returns):
    gate, begun = threading.Event(), threading.Event()

    async def work(scope, group):
        def job():
            begun.set()
            assert gate.wait(20)

        await scope.run("prepare", job)

    script.work = work
    await worker.configure()
    await worker.begin(2, groups=1)
    assert await asyncio.to_thread(begun.wait, 20)
    learner = broker.clients[0]
    storage = await written(learner)
    await spilled(broker, storage)
    lease = await full_lease(learner, epoch=2)
    seen = worker.actor.status().events_seen
    holding = asyncio.create_task(storage.hold_read(WeightsVersion(0)))
    await worker.until(lambda: worker.actor.status().events_seen > seen)
    assert returns == []
    gate.set()
    await worker.until(lambda: bool(returns))
    assert returns[0].startswith("compute")
    lease.abandon("a test")
    (await holding).release()
    storage.close()


async def test_a_run_that_is_over_leaves_nothing_in_the_cache(worker, script, returns):
    await worker.configure()
    assert returns == []
    await worker.release()
    assert script.changes[-1] == "close"
    assert len(returns) == 1
