"""Ranks that are configured together, or are not."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import Unavailable
from common.worker import ranks
from common.worker.ranks import RanksAbsent, RanksParted, present
from tests.unit.worker.conftest import Script, running


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


async def test_a_job_that_outlives_its_epoch_ends_the_process(second_of_two, monkeypatch):
    actor = second_of_two.actor
    monkeypatch.setattr("common.worker.actor.PARTED_AFTER_S", 0.1)
    go_on = asyncio.Event()
    actor._epochs.beside("stuck", go_on.wait())
    answer = second_of_two.configure()
    with pytest.raises(RanksParted, match="prefix-encoder/0"):
        await actor.parted()
    with pytest.raises(TimeoutError):
        await answer
    go_on.set()
