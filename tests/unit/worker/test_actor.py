from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from common.errors import FailedPrecondition, InvalidArgument, Unavailable
from common.events.bodies import GroupDropped, StepAborted, TaskFailed
from common.step.tasks import Task
from tests.unit.worker.conftest import Script, running


async def forever(*_):
    await asyncio.Event().wait()


async def test_a_configured_worker_does_the_tasks_of_an_epoch(worker):
    prepared = await worker.configure()
    assert prepared.weights_version == 0
    assert worker.actor.status().phase == "idle"
    await worker.begin(2)
    for group in range(3):
        await worker.told(f"prepare {group} of 2")
    assert worker.actor.status().epoch == 2


async def test_an_epoch_from_before_the_configuration_is_none_of_it(worker):
    await worker.begin(2)
    await worker.configure(epoch=2)
    await worker.begin(3)
    await worker.told("prepare 0 of 3")
    assert "prepare 0 of 2" not in worker.script.told


async def test_a_second_configuration_only_prepares(worker):
    await worker.configure()
    await worker.configure()
    assert worker.script.changes == ["load", "prepare", "prepare"]


async def test_another_run_replaces_the_first(worker):
    await worker.configure()
    await worker.configure("other")
    assert worker.script.changes == ["load", "prepare", "close", "load", "prepare"]
    assert worker.actor.status().run_id == "other"


async def test_one_configuration_at_a_time(worker):
    go_on = asyncio.Event()
    worker.script.load = lambda context: go_on.wait()
    first = worker.configure()
    await worker.told("load")
    assert worker.actor.status().phase == "configuring"
    with pytest.raises(FailedPrecondition, match="still configuring"):
        await worker.configure()
    go_on.set()
    await first


async def test_a_failed_configuration_is_answered_and_cleaned_up(worker):
    async def fails(context):
        raise InvalidArgument("no such model")

    worker.script.load = fails
    with pytest.raises(InvalidArgument, match="no such model"):
        await worker.configure()
    assert worker.actor.status().phase == "unconfigured"
    worker.script.load = None
    await worker.configure()


async def test_a_release_ends_a_configuration_that_runs(worker):
    cleaned_up = []

    async def load(context):
        try:
            await forever()
        finally:
            cleaned_up.append("loaded so far")

    worker.script.load = load
    configured = worker.configure()
    await worker.told("load")
    await worker.release()
    assert cleaned_up
    with pytest.raises(Unavailable, match="was released"):
        await configured
    assert worker.actor.status().phase == "unconfigured"


async def test_a_release_that_crosses_the_end_of_a_configuration(worker):
    released = []

    async def prepare():
        # In the mailbox before the end of this configuration is.
        released.append(worker.release())

    worker.script.prepare = prepare
    with pytest.raises(Unavailable, match="was released"):
        await worker.configure()
    await released[0]
    assert worker.actor.status().phase == "unconfigured"
    await worker.begin(2)
    worker.script.prepare = None
    await worker.configure(epoch=2)
    await worker.begin(3)
    await worker.told("prepare 0 of 3")


async def test_a_release_of_another_run_changes_nothing(worker):
    await worker.configure()
    await worker.release("other")
    assert worker.actor.status().phase == "idle"
    await worker.release()
    assert worker.script.changes[-1] == "close"


async def test_an_aborted_epoch_cancels_its_tasks(worker):
    cancelled = []

    async def work(scope, group):
        try:
            await forever()
        finally:
            cancelled.append(group)

    worker.script.work = work
    await worker.configure()
    await worker.begin(2)
    await worker.told("prepare 1 of 2")
    await worker.abort(2)
    await worker.told("end 2")
    await worker.until(lambda: cancelled == [0, 1])
    await worker.begin(3)
    await worker.told("prepare 1 of 3")


async def test_a_task_that_is_cancelled_before_its_first_line_leaves_nothing(worker):
    await worker.configure()
    for epoch in range(2, 12):
        await worker.begin(epoch)
        await worker.abort(epoch)
    await worker.told("end 11")
    await worker.quiesce()
    gc.collect()


async def test_preparing_waits_for_the_compute_job_of_an_ended_epoch(worker):
    started, go_on = threading.Event(), threading.Event()
    done = []

    def job():
        started.set()
        go_on.wait(10)
        done.append("job")

    async def prepare():
        done.append("prepare")

    worker.script.work = lambda scope, group: scope.run(Task.PREPARE, job)
    await worker.configure()
    await worker.begin(2, groups=1)
    await worker.until(started.is_set)
    worker.script.prepare = prepare
    configured = worker.configure()
    await asyncio.sleep(0.05)
    assert done == []
    go_on.set()
    await configured
    assert done == ["job", "prepare"]


async def test_an_error_of_a_task_is_reported(worker):
    async def work(scope, group):
        raise InvalidArgument("this prompt cannot be")

    worker.script.work = work
    await worker.configure()
    await worker.begin(2, groups=1)
    event = await worker.event(TaskFailed)
    assert event.body.task == "prepare"
    assert event.body.code == "invalid_argument"
    assert not event.body.retryable
    assert event.group == 0


async def test_an_error_of_work_ahead_is_about_no_group_of_the_step(worker):
    async def work(scope, group):
        raise InvalidArgument("this prompt cannot be")

    worker.script.work = work
    await worker.configure()
    await worker.begin(2, groups=0, ahead=1)
    event = await worker.event(TaskFailed)
    assert event.body.task == "ahead_prepare"
    assert event.group is None


async def test_an_epoch_that_cannot_be_begun_is_reported(worker):
    def begin(scope):
        raise InvalidArgument("no recorded responses")

    worker.script.begin = begin
    await worker.configure()
    await worker.begin(2)
    event = await worker.event(TaskFailed)
    assert (event.body.task, event.epoch) == ("begin", 2)
    worker.script.begin = lambda scope: None
    await worker.begin(3)
    await worker.told("prepare 0 of 3")


async def test_an_error_about_a_dropped_group_is_not_reported(worker):
    async def work(scope, group):
        if group == 0:
            await scope.publish(GroupDropped(code="reward", reason="", sample=0), group)
            await worker.told("forget 0")
            raise KeyError("what it had is forgotten")

    worker.script.work = work
    await worker.configure()
    await worker.begin(2)
    await worker.told("prepare 2 of 2")
    await worker.quiesce()
    dropped = await worker.event(GroupDropped)
    # Were the error in the order, it would have come before the answer to this abort.
    await worker.abort(2)
    await worker.event(StepAborted)
    assert dropped.epoch == 2
    assert worker.script.scopes[-1].view.failed is None


async def test_quiesce_starts_nothing_more(worker):
    go_on = asyncio.Event()
    worker.script.work = lambda scope, group: go_on.wait()
    await worker.configure()
    await worker.begin(2)
    await worker.told("prepare 1 of 2")
    quiet = worker.quiesce()
    await asyncio.sleep(0.05)
    assert not quiet.done()
    go_on.set()
    await quiet
    assert "prepare 2 of 2" not in worker.script.told


async def test_shut_down_abandons_what_waits_for_others(worker):
    worker.script.work = forever
    await worker.configure()
    await worker.begin(2)
    await worker.told("prepare 1 of 2")
    async with asyncio.timeout(5):
        await worker.shut_down()
    assert worker.script.told[-2:] == ["end 2", "close"]
    with pytest.raises(Unavailable, match="shutting down"):
        await worker.configure()


async def test_shut_down_ends_a_configuration_that_runs(worker):
    worker.script.load = forever
    configured = worker.configure()
    await worker.told("load")
    async with asyncio.timeout(5):
        await worker.shut_down()
    with pytest.raises(Unavailable, match="shutting down"):
        await configured


async def test_a_checkpoint_is_waited_for(worker):
    """A caller that went away must not lead to a step that changes what is being saved."""
    go_on = asyncio.Event()
    worker.script.save = go_on.wait
    await worker.configure()
    saved = worker.save()
    await worker.until(lambda: worker.actor.status().phase == "checkpoint")
    with pytest.raises(FailedPrecondition, match="being written"):
        await worker.save()
    configured = worker.configure()
    await asyncio.sleep(0.05)
    assert not configured.done()
    go_on.set()
    assert (await saved)[1] == 0
    await configured


async def test_no_checkpoint_in_a_step_or_without_a_run(worker):
    with pytest.raises(FailedPrecondition, match="not configured for run run"):
        await worker.save()
    worker.script.work = forever
    await worker.configure()
    await worker.begin(2)
    await worker.told("prepare 0 of 2")
    with pytest.raises(FailedPrecondition, match="a step is running"):
        await worker.save()


async def test_a_lost_broker_ends_the_run_until_it_is_configured_again(mortal_broker, script):
    script.work = forever
    async with running(mortal_broker, script) as worker:
        await worker.configure()
        await worker.begin(2)
        await worker.told("prepare 1 of 2")
        mortal_broker.process.kill()
        await worker.told("close")
        # Both halves of the link report its loss.
        await asyncio.sleep(0.05)
        assert script.told[-2:] == ["end 2", "close"]
        assert script.told.count("close") == 1
        assert worker.actor.status().phase == "unconfigured"


async def test_a_broker_lost_while_configuring_fails_the_configuration(mortal_broker):
    go_on = asyncio.Event()
    script = Script(load=lambda context: go_on.wait())
    async with running(mortal_broker, script) as worker:
        configured = worker.configure()
        await worker.told("load")
        mortal_broker.process.kill()
        mortal_broker.process.wait()
        await asyncio.sleep(0.05)
        go_on.set()
        with pytest.raises(Unavailable):
            await configured
        await worker.told("close")
        assert worker.actor.status().phase == "unconfigured"


async def test_weights_of_another_run_or_of_none_are_not_checked(worker):
    with pytest.raises(FailedPrecondition, match="not configured for run run"):
        await worker.checksums()
    await worker.configure()
    assert await worker.checksums() == []
    with pytest.raises(FailedPrecondition, match="not configured for run other"):
        await worker.checksums("other")
    await worker.release()
    with pytest.raises(FailedPrecondition, match="not configured for run run"):
        await worker.checksums()
