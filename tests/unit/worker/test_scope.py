"""A scope's holdings, on a real broker."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from common.ids import GroupId, Participant, Service
from common.step.tasks import Task
from common.step.view import StepView
from common.tensors.errors import StaleLease, StorageTorn
from common.tensors.spec import DType, Placement, TensorSpec
from common.tensors.storage import StorageSpec
from common.tensors.views import tensor_view
from common.worker.scope import StepOver, StepScope
from common.worker.threads import in_thread
from tests.unit.worker.conftest import CPU, ENCODER, RUN, step_plan

LEARNER = Participant(service=Service.LEARNER)
NUMBERS = {"numbers": (torch.float32, (4,))}
FLAT = TensorSpec(name="flat", dtype=DType.FLOAT32, shape=(4,))


@pytest.fixture
def compute():
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
async def clients(broker):
    return {p: await broker.join(p) for p in (ENCODER, LEARNER)}


@pytest.fixture
async def open_scope(broker, clients, compute):
    published = []

    async def publish(event):
        published.append(event)

    def make(participant):
        scope = StepScope(
            StepView(step_plan(1), needs_reference=False),
            participant=participant,
            broker=clients[participant],
            compute=compute,
            device=CPU,
            publish=publish,
            spawn=lambda *_: None,
        )
        scope.published = published
        return scope

    return make


def to_learner(scope, **more):
    return {
        "name": "policy.prefix_kv",
        "group": GroupId(0),
        "tensors": NUMBERS,
        "consumers": [LEARNER],
        "next_use": Task.RESPONSE_TRAIN,
        "placement": Placement.DEVICE,
        **more,
    }


async def storage_of(clients, owner=LEARNER):
    spec = StorageSpec(tensors=(FLAT,), readers=(ENCODER,), writers=(LEARNER,))
    return await clients[owner].open_storage(RUN, "policy.weights", create=spec)


async def test_a_lease_is_filled_sealed_held_and_given_back(broker, open_scope):
    producer, consumer = open_scope(ENCODER), open_scope(LEARNER)
    numbers = torch.arange(4.0)
    lease_id = await producer.produce(
        fill=lambda out: out["numbers"].copy_(numbers), **to_learner(producer)
    )
    (lease,) = await consumer.acquire(lease_id)
    assert torch.equal(tensor_view(lease, "numbers"), numbers)
    consumer.give_back(lease)
    await broker.settle(0)
    consumer.give_back(lease)


async def test_close_gives_back_what_was_not_given_back(broker, open_scope):
    producer, consumer = open_scope(ENCODER), open_scope(LEARNER)
    lease_id = await producer.produce(fill=lambda out: None, **to_learner(producer))
    (lease,) = await consumer.acquire(lease_id)
    consumer.close()
    assert not lease.held
    await broker.settle(0)


async def test_what_comes_after_the_end_is_given_back_at_once(broker, open_scope):
    producer, consumer = open_scope(ENCODER), open_scope(LEARNER)
    ids = [await producer.produce(fill=lambda out: None, **to_learner(producer)) for _ in range(2)]
    acquiring = asyncio.create_task(consumer.acquire(*ids))
    await asyncio.sleep(0)
    consumer.end()
    with pytest.raises(StepOver):
        await acquiring
    await broker.settle(0)


async def test_a_lease_that_could_not_be_filled_is_abandoned(broker, open_scope):
    producer, consumer = open_scope(ENCODER), open_scope(LEARNER)
    acquired = []

    async def consume(draft):
        acquired.append(asyncio.create_task(consumer.acquire(draft.lease_id)))
        await asyncio.sleep(0.05)

    async def produce():
        async with producer.writing(**to_learner(producer)) as draft:
            await consume(draft)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await produce()
    with pytest.raises(StaleLease, match="could not fill it"):
        await acquired[0]
    await broker.settle(0)


async def test_what_was_produced_for_a_dropped_group_is_freed(broker, open_scope):
    producer, consumer = open_scope(ENCODER), open_scope(LEARNER)
    lease_id = await producer.produce(fill=lambda out: None, **to_learner(producer))
    producer.forget(GroupId(1))
    assert [entry.lease_id for entry in (await broker.ledger()).entries] == [lease_id]
    producer.forget(GroupId(0))
    await broker.settle(0)
    with pytest.raises(StaleLease, match="group 0 was dropped"):
        await consumer.acquire(lease_id)


async def test_nothing_is_published_or_computed_after_the_end(open_scope):
    scope = open_scope(LEARNER)
    scope.end()
    with pytest.raises(StepOver):
        await scope.run(Task.RESPONSE_TRAIN, lambda: pytest.fail("it ran"))
    with pytest.raises(StepOver):
        await scope.publish(None)
    assert scope.published == []


async def test_an_untouched_rewriting_leaves_the_old_version(clients, open_scope):
    weights, scope = await storage_of(clients), open_scope(LEARNER)
    first = await scope.write(weights, 1, timeout_s=5)
    first.touch()
    await first.publish()
    scope.give_back(first)
    await scope.write(weights, 2, timeout_s=5)
    scope.close()
    reader = await storage_of(clients, ENCODER)
    (await reader.hold_read(1, timeout_s=5)).release()


async def test_a_touched_rewriting_leaves_the_storage_torn(clients, open_scope):
    weights, scope = await storage_of(clients), open_scope(LEARNER)
    rewriting = await scope.write(weights, 1, timeout_s=5)
    rewriting.touch()
    scope.close()
    reader = await storage_of(clients, ENCODER)
    with pytest.raises(StorageTorn):
        await reader.hold_read(1, timeout_s=5)


async def test_an_accumulator_is_let_go_behind_the_job_that_writes_it(
    broker, clients, open_scope, compute
):
    spec = StorageSpec(tensors=(FLAT,), readers=(), writers=(LEARNER, ENCODER))
    mine = await clients[ENCODER].open_storage(RUN, "policy.gradients", create=spec)
    theirs = await clients[LEARNER].open_storage(RUN, "policy.gradients", create=spec)
    scope = open_scope(ENCODER)
    loop = asyncio.get_running_loop()
    started, go_on = asyncio.Event(), asyncio.Event()
    order = []

    def job():
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(10)
        order.append("job")

    async def backward():
        async with scope.exclusive(mine):
            await scope.run(Task.PREFIX_BACKWARD, job)

    task = asyncio.create_task(backward())
    await started.wait()
    scope.end()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    compute.submit(scope.close)

    async def take():
        with await theirs.hold_exclusive(1, timeout_s=10):
            order.append("next holder")

    taking = asyncio.create_task(take())
    await asyncio.sleep(0.05)
    assert order == []
    go_on.set()
    await taking
    assert order == ["job", "next holder"]


async def test_a_job_in_a_thread_is_not_left_behind():
    loop = asyncio.get_running_loop()
    started, go_on = asyncio.Event(), asyncio.Event()
    done = []

    def job():
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(10)
        done.append(True)

    task = asyncio.create_task(in_thread(job))
    await started.wait()
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done
    assert await in_thread(lambda: 3) == 3
