"""Jobs of several services beside a decode, on a real broker."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.governor.table import H200
from common.ids import Epoch, Participant, Service
from common.step.tasks import Task
from common.step.view import StepView
from common.worker.context import RunContext
from common.worker.governor import BACKGROUND, Governor, LiveRows
from common.worker.scope import StepScope
from tests.unit.worker.conftest import CPU, RUN, recipe, step_plan


@pytest.fixture
async def contexts(broker):
    found = {}
    for service in (Service.ROLLOUT, *BACKGROUND):
        participant = Participant(service=service)
        found[service] = RunContext(
            run_id=RUN,
            recipe=recipe(Path("model")),
            run_dir=Path("runs"),
            participant=participant,
            device=CPU.torch,
            broker=await broker.join(participant),
            ledger=None,
            resume_from=None,
            governed=True,
        )
    return found


@pytest.fixture
async def rows(contexts):
    live = await LiveRows.open(contexts[Service.ROLLOUT])
    yield live
    live.close()


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


async def test_everybody_reads_what_the_rollout_wrote(contexts, rows):
    others = [await LiveRows.open(contexts[service]) for service in BACKGROUND]
    assert [live.value for live in others] == [0, 0, 0]
    rows.set(64)
    assert [live.value for live in others] == [64, 64, 64]
    for live in others:
        live.close()


async def test_one_job_at_a_time_beside_a_decode(rows, scopes):
    rows.set(8)
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


async def test_nobody_waits_when_nothing_decodes(contexts, rows, scopes):
    governor = await Governor.open(contexts[Service.LEARNER], H200)
    hold = await governor.token.hold_exclusive(Epoch(1))
    assert (await scopes[0].run(Task.POLICY_PREFIX, lambda: 5)).value == 5
    rows.set(1)
    waiting = asyncio.create_task(scopes[0].run(Task.POLICY_PREFIX, lambda: 6))
    done, _ = await asyncio.wait({waiting}, timeout=0.1)
    assert not done
    hold.release()
    async with asyncio.timeout(20):
        assert (await waiting).value == 6
    governor.close()
