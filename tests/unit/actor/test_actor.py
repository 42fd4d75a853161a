from __future__ import annotations

import asyncio
import logging
import time

import pytest

from common.actor import Actor, ActorState, TaskCancelled, TaskEnded
from common.actor import actor as actor_module
from common.errors import AlreadyExists, FailedPrecondition


class Recorder(Actor):
    """Keeps what it handles; a callable message is called with the actor."""

    def __init__(self, **values):
        super().__init__("recorder", **values)
        self.handled = []
        self.inside = 0

    async def handle(self, message):
        self.inside += 1
        assert self.inside == 1
        await asyncio.sleep(0)
        if callable(message):
            result = message(self)
            if asyncio.iscoroutine(result):
                await result
        else:
            self.handled.append(message)
        self.inside -= 1


@pytest.fixture
async def actor():
    actor = Recorder()
    running = asyncio.create_task(actor.run())
    await asyncio.sleep(0)
    yield actor
    await actor.stop()
    await asyncio.gather(running, return_exceptions=True)


async def until(holds):
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - the actor under test tells nobody
            await asyncio.sleep(0.001)


async def test_messages_are_handled_one_at_a_time_in_order(actor):
    await asyncio.gather(*(actor.mailbox.put(number) for number in range(20)))
    await actor.stop()
    assert actor.handled == list(range(20))
    assert actor.state is ActorState.STOPPED


async def test_task_that_returns_ends_in_one_message(actor):
    await actor.mailbox.put(lambda a: a.spawn("add", asyncio.sleep(0, 3)))
    await until(lambda: actor.handled)
    assert actor.handled == [TaskEnded(name="add", result=3)]
    assert actor.running_tasks == frozenset()


async def test_task_that_raises_ends_in_one_message_and_harms_nobody(actor):
    error = KeyError("x")

    async def fail():
        raise error

    await actor.mailbox.put(lambda a: a.spawn("fail", fail()))
    await until(lambda: actor.handled)
    assert actor.handled == [TaskEnded(name="fail", error=error)]
    assert actor.state is ActorState.RUNNING


async def test_cancelled_task_ends_in_one_message_even_before_its_first_line(actor):
    def spawn_and_cancel(a):
        a.spawn("wait", asyncio.sleep(600))
        assert a.cancel("wait")

    await actor.mailbox.put(spawn_and_cancel)
    await until(lambda: actor.handled)
    (ended,) = actor.handled
    assert ended.name == "wait"
    assert isinstance(ended.error, TaskCancelled)
    assert not actor.cancel("wait")


async def test_task_cancelled_while_it_runs_ends_in_one_message(actor):
    begun = asyncio.Event()

    async def work():
        begun.set()
        await asyncio.sleep(600)

    await actor.mailbox.put(lambda a: a.spawn("work", work()))
    await asyncio.wait_for(begun.wait(), 10)
    assert actor.cancel("work")
    await until(lambda: actor.handled)
    assert [type(ended.error) for ended in actor.handled] == [TaskCancelled]


async def test_name_of_a_running_task_cannot_be_taken_twice(actor):
    outcome = []

    def spawn_twice(a):
        a.spawn("wait", asyncio.sleep(600))
        try:
            a.spawn("wait", asyncio.sleep(600))
        except AlreadyExists as error:
            outcome.append(str(error))

    await actor.mailbox.put(spawn_twice)
    await until(lambda: outcome)
    assert "task named wait" in outcome[0]


async def test_messages_are_handled_while_tasks_run(actor):
    await actor.mailbox.put(lambda a: a.spawn("wait", asyncio.sleep(600)))
    await actor.mailbox.put("health")
    await until(lambda: actor.handled == ["health"])
    assert actor.running_tasks == {"wait"}


async def test_stop_cancels_tasks_and_is_idempotent(actor):
    ended = []

    async def work():
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(True)

    await actor.mailbox.put(lambda a: a.spawn("work", work()))
    await until(lambda: actor.running_tasks)
    await asyncio.sleep(0)
    await asyncio.gather(actor.stop(), actor.stop())
    await actor.stop()
    assert ended == [True]
    assert actor.handled == []
    with pytest.raises(FailedPrecondition):
        actor.spawn("late", asyncio.sleep(0))


async def test_stop_right_after_spawn_leaves_no_work_unawaited(actor):
    def spawn_and_stop(a):
        a.spawn("work", asyncio.sleep(600))
        a.mailbox.close()

    await actor.mailbox.put(spawn_and_stop)
    await actor.stop()
    assert actor.running_tasks == frozenset()


async def test_actor_can_stop_itself(actor):
    await actor.mailbox.put(lambda a: a.stop())
    await until(lambda: actor.state is ActorState.STOPPED)


async def test_stop_before_run_is_legal():
    actor = Recorder()
    await actor.stop()
    assert actor.state is ActorState.STOPPED


async def test_error_in_a_handler_fails_the_actor_and_run_raises_it():
    actor = Recorder()
    error = KeyError("x")

    def fail(_):
        raise error

    await actor.mailbox.put(lambda a: a.spawn("wait", asyncio.sleep(600)))
    await actor.mailbox.put(fail)
    with pytest.raises(KeyError) as caught:
        await actor.run()
    assert caught.value is error
    assert actor.state is ActorState.FAILED
    assert actor.running_tasks == frozenset()
    await actor.stop()


async def test_cancelled_run_leaves_no_task():
    actor = Recorder()
    await actor.mailbox.put(lambda a: a.spawn("wait", asyncio.sleep(600)))
    running = asyncio.create_task(actor.run())
    await until(lambda: actor.running_tasks)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert actor.running_tasks == frozenset()
    assert actor.state is ActorState.STOPPED


async def test_cancelled_run_does_not_wait_for_room_in_its_mailbox():
    actor = Recorder(mailbox_capacity=1)

    async def block(a):
        a.spawn("work", asyncio.sleep(600))
        a.mailbox.offer("fills it")
        await asyncio.sleep(600)

    await actor.mailbox.put(block)
    running = asyncio.create_task(actor.run())
    await until(lambda: actor.running_tasks)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 10)


async def test_ended_tasks_wait_for_room_in_a_full_mailbox():
    actor = Recorder(mailbox_capacity=1)
    running = asyncio.create_task(actor.run())
    await asyncio.sleep(0)

    def spawn_many(a):
        for number in range(10):
            a.spawn(str(number), asyncio.sleep(0, number))

    await actor.mailbox.put(spawn_many)
    await until(lambda: len(actor.handled) == 10)
    assert sorted(ended.result for ended in actor.handled) == list(range(10))
    await actor.stop()
    await running


async def test_slow_handler_is_logged_by_name(actor, caplog, monkeypatch):
    monkeypatch.setattr(actor_module, "SLOW_HANDLER_S", 0.01)
    with caplog.at_level(logging.WARNING):
        await actor.mailbox.put(lambda _: time.sleep(0.02))
        await actor.stop()
    (record,) = [record for record in caplog.records if record.message == "slow handler"]
    assert record.handled == "function"
    assert record.took_s >= 0.02
