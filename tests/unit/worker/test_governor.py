"""Jobs of several services beside a decode, on a real broker."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from common.governor.table import H200, CoRun, CoRunTable, load_table
from common.ids import Epoch, Participant, Service
from common.step.partners import Partners
from common.step.place import Place
from common.step.tasks import Task
from common.step.view import StepView
from common.worker import decode_watch
from common.worker.context import RunContext
from common.worker.governor import TABLES_FOLDER, WRITTEN_AT_FIRST, Governor
from common.worker.live_decode import BACKGROUND, LiveDecode
from common.worker.scope import StepScope
from common.worker.sm_token import SmToken
from tests.unit.worker.conftest import CPU, RUN, recipe, step_plan

ROWS = 8


@pytest.fixture
async def contexts(broker, tmp_path):
    found = {}
    for service in (Service.ROLLOUT, *BACKGROUND):
        participant = Participant(service=service)
        found[service] = RunContext(
            run_id=RUN,
            recipe=recipe(Path("model")),
            run_dir=tmp_path,
            participant=participant,
            device=CPU.torch,
            broker=await broker.join(participant),
            ledger=None,
            resume_from=None,
            governed=True,
        )
    return found


@pytest.fixture
async def live(contexts):
    live = await LiveDecode.open(contexts[Service.ROLLOUT])
    yield live
    live.close()


@pytest.fixture
async def governor(contexts):
    governor = await Governor.open(contexts[Service.LEARNER], H200)
    yield governor
    governor.close()


@pytest.fixture
async def scopes(contexts):
    governors = {service: await Governor.open(contexts[service], H200) for service in BACKGROUND}
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        made = []
        for service, compute in zip(BACKGROUND[:2], (first, second), strict=True):
            made.append(
                StepScope(
                    StepView(step_plan(1), needs_reference=False),
                    participant=Participant(service=service),
                    broker=contexts[service].broker,
                    compute=compute,
                    device=CPU,
                    governor=governors[service],
                    publish=None,
                    spawn=None,
                )
            )
        yield made
    for governor in governors.values():
        governor.close()


async def test_everybody_reads_what_the_rollout_wrote(contexts, live):
    others = [await LiveDecode.open(contexts[service]) for service in BACKGROUND]
    assert [other.rows for other in others] == [0, 0, 0]
    live.set_rows(64)
    live.admitted()
    live.iterated(5)
    for other in others:
        reading = other.reading()
        assert (reading.rows, reading.admissions, reading.iterations) == (64, 1, 5)
        assert reading.ended_ns == live.reading().ended_ns
        other.close()


class Told:
    """The other ranks; what rank 0 chooses is `share`."""

    def __init__(self, share: int = 0) -> None:
        self.share = share
        self.heard: list[int] = []

    def told(self, number: int) -> int:
        self.heard.append(number)
        return self.share or number


async def test_rank_0_tells_the_others_what_it_has_chosen(contexts, live):
    context = contexts[Service.LEARNER]
    ranks = Told()
    governor = await Governor.open(replace(context, joined=ranks), H200)
    live.set_rows(ROWS)
    assert governor.wants_token
    assert governor.run(Task.RESPONSE_TRAIN, lambda: 7).value == 7
    assert ranks.heard == [1]
    governor.run(Task.UPDATE, lambda: 7, beside=False)
    assert ranks.heard == [1]
    governor.close()


async def test_other_ranks_neither_hold_the_token_nor_choose(broker, contexts):
    second = {service: Participant(service=service, rank=1) for service in contexts}
    joined = {service: await broker.join(one) for service, one in second.items()}
    at = [
        replace(
            contexts[service],
            participant=one,
            broker=joined[service],
            joined=Told(1),
            place=Place(rank=1, degree=2),
            partners=Partners(dict.fromkeys(second, 2)),
        )
        for service, one in second.items()
    ]
    live = await LiveDecode.open(at[0])
    governor = await Governor.open(at[-1], H200)
    live.set_rows(ROWS)
    assert not governor.wants_token
    assert governor.token.share == 0
    governed = governor.run(Task.RESPONSE_TRAIN, lambda: governor.token.share, beside=False)
    assert (governed.value, governed.decode_rate) == (0, 0.0)
    assert at[-1].joined.heard == [1]
    governor.close()
    live.close()


async def test_nothing_decodes_once_a_rollout_that_died_is_back(broker, contexts, live):
    other = await LiveDecode.open(contexts[Service.LEARNER])
    live.set_rows(64)
    rollout = contexts[Service.ROLLOUT]
    await rollout.broker.close()
    assert other.rows == 64
    again = replace(rollout, broker=await broker.join(rollout.participant))
    (await LiveDecode.open(again)).close()
    assert other.rows == 0
    other.close()


async def test_one_job_at_a_time_beside_a_decode(live, scopes):
    live.set_rows(ROWS)
    inside: list[int] = []

    def job(number: int) -> int:
        inside.append(number)
        time.sleep(0.01)
        alone = inside == [number]
        inside.remove(number)
        return alone

    running = [
        scope.run(Task.POLICY_PREFIX, lambda number=number: job(number))
        for number in range(4)
        for scope in scopes[number % 2 :][:1]
    ]
    done = await asyncio.gather(*running)
    assert [timed.value for timed in done] == [True] * 4
    assert [timed.span.sms for timed in done] == [0] * 4  # a CPU has no shares


async def test_the_rollout_sees_the_share_of_a_job_beside_its_decode(contexts, governor, live):
    token = await SmToken.open(contexts[Service.ROLLOUT])
    assert governor.run(Task.RESPONSE_TRAIN, lambda: token.share, beside=False).value == 0
    live.set_rows(ROWS)
    assert governor.run(Task.RESPONSE_TRAIN, lambda: token.share).value == 1  # a CPU is one share
    assert token.share == 0

    def fails():
        raise ValueError

    with pytest.raises(ValueError):
        governor.run(Task.RESPONSE_TRAIN, fails)
    assert token.share == 0
    token.close()


async def test_nobody_waits_when_nothing_decodes(governor, live, scopes):
    hold = await governor.token.storage.hold_exclusive(Epoch(1))
    assert (await scopes[0].run(Task.POLICY_PREFIX, lambda: 5)).value == 5
    live.set_rows(1)
    waiting = asyncio.create_task(scopes[0].run(Task.POLICY_PREFIX, lambda: 6))
    done, _ = await asyncio.wait({waiting}, timeout=0.1)
    assert not done
    hold.release()
    async with asyncio.timeout(20):
        assert (await waiting).value == 6


ALONE_S = 0.05
"""A job that begins four times later than the last iteration ended is beside no decode."""


def whole_jobs(governor, count):
    for _ in range(count):
        governor.run(Task.RESPONSE_TRAIN, lambda: None, beside=False)


def jobs_beside(governor, live, count, *, during=lambda: None):
    """Each is longer than an iteration of the decode alone, and sees the end of one."""
    governor._judgement.measured.add_alone(ROWS, ALONE_S)

    def job() -> None:
        time.sleep(ALONE_S)
        during()
        live.iterated()

    live.set_rows(ROWS)
    done = []
    for _ in range(count):
        live.iterated()
        done.append(governor.run(Task.RESPONSE_TRAIN, job, work=4.0))
    live.set_rows(0)
    return done


async def test_the_decode_alone_is_measured_once_a_step(live, governor, monkeypatch):
    monkeypatch.setattr(decode_watch, "LIMIT_S", 20.0)  # on a machine with other work to do
    ends = threading.Event()

    def decode() -> None:
        while not ends.is_set():
            time.sleep(0.001)
            live.iterated()

    thread = threading.Thread(target=decode)
    live.set_rows(ROWS)
    thread.start()
    governor.watch_alone()
    ends.set()
    thread.join()
    alone_s = governor._judgement.measured.alone_s(ROWS)
    assert alone_s is not None
    assert alone_s >= 0.001
    assert not governor._judgement.measured.ask_alone(ROWS)
    governor.step_ended(0, window_closed=True)
    assert governor._judgement.measured.ask_alone(ROWS)
    live.set_rows(0)


async def test_the_decode_beside_a_job_is_measured_and_written_down(
    contexts, live, governor, caplog
):
    whole_jobs(governor, 3)
    done = jobs_beside(governor, live, 4)
    assert all(governed.sms == 0 for governed in done)  # a CPU has no shares
    assert all(governed.decode_rate > 0 for governed in done)
    with caplog.at_level(logging.INFO, logger="common.worker.governor"):
        governor.step_ended(0, window_closed=True)
        governor.step_ended(1, window_closed=True)
    (record,) = [found for found in caplog.records if found.message == "beside the decode"]
    assert record.step == 0
    assert "4 on 1 SMs" in record.response_train
    table = load_table(contexts[Service.LEARNER].run_dir / TABLES_FOLDER / "learner.json")
    (entry,) = table.entries
    assert (table.device, table.device_sms) == ("cpu", 1)
    assert (entry.task, entry.rows, entry.sms) == (Task.RESPONSE_TRAIN, ROWS, 1)
    assert 0 < entry.background_rate < 1
    assert load_table(contexts[Service.LEARNER].run_dir / TABLES_FOLDER) == table


async def test_a_decode_that_changes_beside_a_job_gives_no_rate(live, governor):
    for change in (live.admitted, lambda: live.set_rows(2 * ROWS)):
        (governed,) = jobs_beside(governor, live, 1, during=change)
        assert governed.decode_rate == 0


async def test_a_window_that_work_did_not_fill_gets_cheaper(live, governor):
    def price_after(job, spare):
        before = governor._price.of(Task.POLICY_PREFIX)
        live.set_rows(ROWS)
        governor.run(Task.POLICY_PREFIX, job)
        spare()
        governor.step_ended(0, window_closed=True)
        return governor._price.of(Task.POLICY_PREFIX) - before

    def decode_on():
        time.sleep(0.2)
        live.iterated()

    assert price_after(lambda: None, decode_on) < 0
    assert price_after(live.iterated, lambda: None) > 0
    before = governor._price.of(Task.POLICY_PREFIX)
    governor.run(Task.POLICY_PREFIX, lambda: None)
    live.iterated()
    governor.step_ended(1, window_closed=False)  # an aborted step has no whole window
    assert governor._price.of(Task.POLICY_PREFIX) == before
    governor.step_ended(1, window_closed=True)  # nothing ran beside a decode: nothing is learned
    assert governor._price.of(Task.POLICY_PREFIX) == before


async def test_the_table_is_not_written_after_every_step(contexts, live, governor):
    path = contexts[Service.LEARNER].run_dir / TABLES_FOLDER / "learner.json"
    whole_jobs(governor, 2)
    jobs_beside(governor, live, 4)
    written = []
    for step in range(WRITTEN_AT_FIRST + 2):
        governor.step_ended(step, window_closed=True)
        written.append(path.exists())
        path.unlink(missing_ok=True)
    assert written == [True] * WRITTEN_AT_FIRST + [False] * 2


async def test_nothing_is_written_where_nothing_was_measured(contexts, live, governor, caplog):
    whole_jobs(governor, 3)
    governor.step_ended(0, window_closed=True)
    assert not (contexts[Service.LEARNER].run_dir / TABLES_FOLDER).exists()
    assert "beside the decode" not in caplog.text


async def test_a_folder_that_cannot_be_written_ends_nothing(contexts, live, governor, caplog):
    (contexts[Service.LEARNER].run_dir / TABLES_FOLDER).write_text("in the way")
    whole_jobs(governor, 2)
    jobs_beside(governor, live, 4)
    governor.step_ended(0, window_closed=True)
    assert "co-run rates not written" in caplog.text


async def test_a_table_of_the_deployment_is_the_only_source(contexts, live):
    entry = CoRun(rows=ROWS, sms=1, gain=1.5, background_rate=0.5)
    table = CoRunTable(device="here", device_sms=1, entries=(entry,))
    governor = await Governor.open(contexts[Service.LEARNER], table, fixed=True)
    whole_jobs(governor, 2)
    jobs_beside(governor, live, 4)
    assert governor._judgement.chooser.rates(Task.RESPONSE_TRAIN, ROWS, 1).gain == 1.5
    governor.close()


async def test_the_end_of_a_scope_is_the_end_of_the_governors_step(live, scopes, caplog):
    live.set_rows(ROWS)
    await scopes[0].run(Task.POLICY_PREFIX, lambda: None)
    with caplog.at_level(logging.INFO, logger="common.worker.governor"):
        scopes[0].close()
    assert "beside the decode" in caplog.text


async def test_work_done_ahead_is_of_the_kind_it_is_ahead_of(live, governor):
    measured = governor._judgement.measured

    def ahead(value):
        governor.run(Task.AHEAD_REFERENCE, lambda: value, beside=False)

    for _ in range(3):
        measured.add_beside(Task.REFERENCE_PREFIX, ROWS, 1, unit_s=100.0, decode_rate=0.5)
        ahead(None)  # it came too late to do anything
    assert measured.rates(Task.REFERENCE_PREFIX, ROWS, 1).background == 1.0  # the prior's
    for _ in range(2):
        ahead(5)
    assert measured.rates(Task.REFERENCE_PREFIX, ROWS, 1).background < 0.5
