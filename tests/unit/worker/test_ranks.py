"""Ranks that are configured together, or are not."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager, contextmanager

import pytest
import torch

from common.errors import Unavailable
from common.step.place import Place
from common.worker import ranks
from common.worker.ranks import RanksAbsent, RanksParted, present
from tests.unit.worker.conftest import ENCODER, RUN, Script, running

JOIN_S = 50.0


async def test_ranks_wait_for_each_other(tmp_path):
    seen, all_in = [], asyncio.Barrier(3)

    async def one(rank):
        async with present(tmp_path / "join", rank=rank, degree=3):
            seen.append(rank)
            await all_in.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(one(0))
        group.create_task(one(2))
        await asyncio.sleep(0.1)
        assert seen == []
        group.create_task(one(1))
    assert sorted(seen) == [0, 1, 2]
    assert not any(tmp_path.iterdir())


async def test_a_rank_that_does_not_come_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "PRESENT_TIMEOUT_S", 0.1)
    with pytest.raises(RanksAbsent, match=r"ranks \[1\] have not come"):
        async with present(tmp_path / "join", rank=0, degree=2):
            raise AssertionError("it is alone")
    assert not any(tmp_path.iterdir())


@pytest.fixture
async def second_of_two(broker):
    """A worker of several ranks, whose others never come."""
    async with running(broker, Script(), ranks=2) as worker:
        yield worker


async def test_a_newer_configuration_ends_one_that_waits_for_ranks(second_of_two):
    first = second_of_two.configure(epoch=1)
    second = second_of_two.configure(epoch=2)
    with pytest.raises(Unavailable, match="epoch 2 has begun"):
        await first
    assert second_of_two.actor.status().phase == "configuring"
    assert not second.done()
    await second_of_two.release()
    with pytest.raises(Unavailable, match="was released"):
        await second


def rendezvous(worker, epoch):
    return worker.broker.deployment.socket_dir / f"{ENCODER.service}-0-{RUN}-{epoch}.ranks"


def mark(worker, epoch, rank):
    """What is there while the rank waits to be configured for that epoch."""
    return rendezvous(worker, epoch).with_name(f"{rendezvous(worker, epoch).name}.{rank}")


@contextmanager
def present_too(worker, *epochs):
    """Rank 1 waits to be configured."""
    marks = [mark(worker, epoch, 1) for epoch in epochs]
    for one in marks:
        one.touch()
    yield
    for one in marks:
        one.unlink()


@asynccontextmanager
async def other_rank(worker, *epochs):
    """A process that joins once an epoch, and leaves."""
    other = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.worker.other_rank",
        *(str(rendezvous(worker, epoch)) for epoch in epochs),
    )
    try:
        yield other
    finally:
        if other.returncode is None:
            other.kill()
            await other.wait()


async def test_a_job_that_others_have_given_up_ends_the_process(second_of_two, monkeypatch):
    actor = second_of_two.actor
    monkeypatch.setattr("common.worker.actor.PARTED_AFTER_S", 0.1)
    go_on = asyncio.Event()
    actor._epochs.beside("stuck", go_on.wait())
    answer = second_of_two.configure()
    with present_too(second_of_two, 1):
        with pytest.raises(RanksParted, match="prefix-encoder/0"):
            await actor.parted()
        with pytest.raises(TimeoutError):
            await answer
    go_on.set()


async def test_what_belongs_to_no_epoch_may_take_long(second_of_two, monkeypatch):
    """Such as a checkpoint, which no rank ends before the others."""
    actor = second_of_two.actor
    monkeypatch.setattr("common.worker.actor.PARTED_AFTER_S", 0.1)
    go_on = asyncio.Event()
    actor._epochs.beside("checkpoint", go_on.wait())
    answer = second_of_two.configure()
    await asyncio.sleep(0.5)
    assert not answer.done()
    monkeypatch.setattr("common.worker.actor.PARTED_AFTER_S", 30.0)
    go_on.set()
    await second_of_two.until(mark(second_of_two, 1, 0).exists)
    await second_of_two.release()
    with pytest.raises(Unavailable, match="was released"):
        await answer


async def test_a_join_with_a_rank_that_has_died_ends_the_process(second_of_two, monkeypatch):
    """One that does not end joins others afterwards all the same."""
    worker = second_of_two
    monkeypatch.setattr("common.worker.actor.PARTED_AFTER_S", 0.1)
    monkeypatch.setattr(ranks, "AGREE_TIMEOUT_S", 2.0)
    first = worker.configure(epoch=3)
    with present_too(worker, 3):
        await worker.until(rendezvous(worker, 3).exists)
    second = worker.configure(epoch=4)
    with pytest.raises(RanksParted, match="prefix-encoder/0: a job or a join"):
        await worker.actor.parted()
    with pytest.raises(Unavailable, match="epoch 4 has begun"):
        await first
    monkeypatch.setattr(ranks, "AGREE_TIMEOUT_S", JOIN_S)
    async with other_rank(worker, 4) as other:
        with present_too(worker, 4):
            async with asyncio.timeout(JOIN_S):
                await second
                assert await other.wait() == 0


async def test_a_newer_configuration_is_no_reason_to_end(second_of_two, monkeypatch):
    """What waits for ranks that have not come is cancelled."""
    worker = second_of_two
    monkeypatch.setattr("common.worker.actor.PARTED_AFTER_S", 0.1)
    first = worker.configure(epoch=5)
    await worker.until(mark(worker, 5, 0).exists)
    second = worker.configure(epoch=6)
    await worker.until(mark(worker, 6, 0).exists)
    await asyncio.sleep(0.5)
    assert not worker.actor._parted.is_set()
    await worker.release()
    for answer in (first, second):
        with pytest.raises(Unavailable):
            await answer


async def test_a_cancelled_join_leaves_nothing_behind(second_of_two):
    """The ranks join although one of them is not to any more; it can join again."""
    worker = second_of_two
    first = worker.configure(epoch=1)
    with present_too(worker, 1):
        await worker.until(rendezvous(worker, 1).exists)
    second = worker.configure(epoch=2)
    with pytest.raises(Unavailable, match="epoch 2 has begun"):
        await first
    async with other_rank(worker, 1, 2) as other:
        with present_too(worker, 2):
            async with asyncio.timeout(JOIN_S):
                assert await other.wait() == 0
                await second
    assert worker.script.changes == ["load", "prepare"]


async def test_a_join_that_has_failed_is_not_in_the_way_of_the_next(tmp_path, monkeypatch):
    """The other rank may be a process that has just started."""

    def join(name):
        place, cpu = Place(rank=0, degree=2), torch.device("cpu")
        return ranks.Ranks.join(tmp_path / name, place=place, device=cpu, collective_timeout_s=30.0)

    with monkeypatch.context() as patch:
        patch.setattr(ranks, "AGREE_TIMEOUT_S", 0.5)
        with pytest.raises(RuntimeError):
            await asyncio.to_thread(join, "alone")
    assert not any(tmp_path.iterdir())
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.integration.worker.other_rank", str(tmp_path / "both")
    )
    try:
        async with asyncio.timeout(JOIN_S):
            joined = await asyncio.to_thread(join, "both")
        joined.leave()
        assert await other.wait() == 0
    finally:
        if other.returncode is None:
            other.kill()
            await other.wait()
