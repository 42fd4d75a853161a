from __future__ import annotations

import asyncio
import signal

import pytest

from common.errors import AlreadyExists, FailedPrecondition, NotFound, Stale
from common.ids import Epoch, RunId, WeightsVersion
from common.registry.connection import open_redis
from common.registry.runs import DurableRecord, RunLedger

pytestmark = pytest.mark.redis

RUN = RunId("r1")
NO_EPOCH = Epoch(0)


@pytest.fixture
async def ledger(redis_server):
    ledger = RunLedger(redis_server.url, "test", deadline_s=20)
    yield ledger
    await ledger.close()


async def create(ledger, run=RUN, at=1, **values):
    return await ledger.create(
        run,
        state="PENDING",
        created_unix_ms=at,
        fields={"recipe": {"steps": [], "lr": 1.5}},
        **values,
    )


def durable(version, epoch, kind="checkpoint"):
    return DurableRecord(
        kind=kind,
        version=WeightsVersion(version),
        location=f"/w/{version}",
        epoch=Epoch(epoch),
        metrics={"loss": 0.5},
    )


class LostReplies:
    """A Redis client whose connection breaks after the effect, once for each command."""

    def __init__(self, client):
        self._client = client
        self.lost = []

    def __getattr__(self, name):
        async def call(*args, **kwargs):
            result = await getattr(self._client, name)(*args, **kwargs)
            if (name, args) not in self.lost:
                self.lost.append((name, args))
                raise ConnectionError("reply lost")
            return result

        return call


@pytest.fixture
async def lossy(ledger):
    client = ledger._redis
    ledger._redis = LostReplies(client)
    yield ledger
    assert len(ledger._redis.lost) >= 5
    ledger._redis = client


async def test_created_run_is_read_back_with_its_values(ledger):
    made = await create(ledger)
    assert (made.state, made.epoch, made.created_unix_ms) == ("PENDING", 0, 1)
    assert made.fields == {"recipe": {"steps": [], "lr": 1.5}}
    assert await ledger.get(RUN) == made
    await create(ledger, RunId("r0"), at=2)
    assert [run.run_id for run in await ledger.runs()] == ["r1", "r0"]


async def test_same_request_makes_one_run_and_same_id_is_refused(ledger):
    first = await create(ledger, request_id="q")
    assert await create(ledger, RunId("r2"), request_id="q") == first
    assert len(await ledger.runs()) == 1
    with pytest.raises(AlreadyExists, match="run r1 exists"):
        await create(ledger)


async def test_unknown_run_is_named(ledger):
    for call in (
        ledger.get(RUN),
        ledger.next_epoch(RUN),
        ledger.update(RUN, epoch=NO_EPOCH, state="RUNNING"),
        ledger.append_journal(RUN, epoch=NO_EPOCH, kind="step", body={}),
        ledger.commit_durable(RUN, durable(1, 0)),
    ):
        with pytest.raises(NotFound, match="no run r1"):
            await call
    assert await ledger.durable(RUN) == []
    assert await ledger.read_journal(RUN) == []


async def test_update_changes_what_is_given_and_keeps_the_rest(ledger):
    await create(ledger)
    epoch = await ledger.next_epoch(RUN)
    assert epoch == 1
    updated = await ledger.update(
        RUN, epoch=epoch, expect={"PENDING"}, state="RUNNING", fields={"steps_done": 3}
    )
    assert (updated.state, updated.epoch) == ("RUNNING", 1)
    assert updated.fields == {"recipe": {"steps": [], "lr": 1.5}, "steps_done": 3}
    assert (await ledger.update(RUN, epoch=epoch, fields={"steps_done": 4})).state == "RUNNING"


async def test_unexpected_state_is_refused_and_nothing_changes(ledger):
    before = await create(ledger)
    with pytest.raises(FailedPrecondition, match="is PENDING; this needs it to be PAUSED or RUN"):
        await ledger.update(
            RUN, epoch=NO_EPOCH, expect={"RUNNING", "PAUSED"}, state="STOPPED", fields={"x": 1}
        )
    assert await ledger.get(RUN) == before


async def test_older_epoch_can_write_nothing(ledger):
    await create(ledger)
    old = await ledger.next_epoch(RUN)
    new = await ledger.next_epoch(RUN)
    for call in (
        ledger.update(RUN, epoch=old, state="RUNNING"),
        ledger.append_journal(RUN, epoch=old, kind="step", body={}),
        ledger.commit_durable(RUN, durable(1, old)),
    ):
        with pytest.raises(Stale, match="epoch 1 of run r1 has ended: epoch 2 was taken"):
            await call
    assert (await ledger.get(RUN)).state == "PENDING"
    assert await ledger.read_journal(RUN) == []
    assert await ledger.durable(RUN) == []
    await ledger.commit_durable(RUN, durable(1, new))


async def test_journal_is_read_in_order_and_continued(ledger):
    await create(ledger)
    epoch = await ledger.next_epoch(RUN)
    ids = [
        await ledger.append_journal(RUN, epoch=epoch, kind="step", body={"step": step})
        for step in range(5)
    ]
    first = await ledger.read_journal(RUN, limit=2)
    assert [entry.entry_id for entry in first] == ids[:2]
    rest = await ledger.read_journal(RUN, after=first[-1].entry_id)
    assert [entry.body["step"] for entry in rest] == [2, 3, 4]
    assert {(entry.kind, entry.epoch) for entry in rest} == {("step", 1)}


async def test_durable_copies_come_newest_first_one_of_each_kind(ledger):
    await create(ledger)
    epoch = await ledger.next_epoch(RUN)
    await ledger.commit_durable(RUN, durable(4, epoch))
    await ledger.commit_durable(RUN, durable(5, epoch, "shadow"))
    assert [r.version for r in await ledger.durable(RUN)] == [5, 4]
    await ledger.commit_durable(RUN, durable(5, epoch))
    assert [r.kind for r in await ledger.durable(RUN)] == ["checkpoint", "shadow"]
    # The shadow was lost with its machine: the run went back, and its commits count.
    await ledger.commit_durable(RUN, durable(3, epoch, "shadow"))
    assert [r.version for r in await ledger.durable(RUN)] == [5, 3]


async def test_writes_repeated_after_a_lost_reply_have_one_effect(lossy):
    await create(lossy)
    epoch = await lossy.next_epoch(RUN)
    await lossy.update(RUN, epoch=epoch, expect={"PENDING"}, state="RUNNING")
    entry_id = await lossy.append_journal(RUN, epoch=epoch, kind="step", body={"step": 1})
    await lossy.commit_durable(RUN, durable(1, epoch))
    assert [entry.entry_id for entry in await lossy.read_journal(RUN)] == [entry_id]
    assert (await lossy.get(RUN)).state == "RUNNING"


async def test_what_was_committed_survives_a_killed_redis(ledger, redis_server):
    await create(ledger)
    epoch = await ledger.next_epoch(RUN)
    await ledger.commit_durable(RUN, durable(7, epoch))
    await ledger.append_journal(RUN, epoch=epoch, kind="step", body={"step": 7})
    redis_server.stop(signal.SIGKILL)
    reading = asyncio.create_task(ledger.durable(RUN))
    await redis_server.start()
    assert await asyncio.wait_for(reading, 20) == [durable(7, epoch)]
    assert len(await ledger.read_journal(RUN)) == 1
    assert await ledger.next_epoch(RUN) == epoch + 1


async def test_keys_are_those_that_the_table_lists(ledger, redis_server):
    await create(ledger, request_id="q")
    epoch = await ledger.next_epoch(RUN)
    await ledger.append_journal(RUN, epoch=epoch, kind="step", body={})
    await ledger.commit_durable(RUN, durable(1, epoch))
    client = open_redis(redis_server.url)
    found = {key: await client.type(key) for key in await client.keys("*")}
    await client.aclose()
    assert found == {
        "rollplex:test:runs": "zset",
        "rollplex:test:request:q": "string",
        "rollplex:test:run:{r1}:record": "hash",
        "rollplex:test:run:{r1}:durable": "hash",
        "rollplex:test:run:{r1}:journal": "stream",
    }
