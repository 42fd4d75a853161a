"""Work for the next step's prompts changes when things are done, and nothing else."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from common.events import bodies
from common.step.schedule import Schedule
from common.step.tasks import AHEAD, Task
from rollplex.models import RunState
from tests.integration.runs.lab import Finished, Lab
from tests.integration.runs.moments import ENCODER, ROLLOUT, Striker
from tests.integration.runs.recipes import different, recipe
from tests.integration.runs.strikes import kill, until

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(240)]

STEPS = 8
GROUPS = 4
PATIENCE = timedelta(seconds=90)
OVERLAPPED = (Schedule.ROLLPLEX, Schedule.FUSED)


def wanted(lab, schedule, *, ahead=True, train_vision=False, **data):
    return recipe(
        lab.model,
        schedule,
        model={"train_vision": train_vision},
        data=data,
        rollout={"max_new_tokens": 48},
        training={"steps": STEPS, "prompts_per_step": GROUPS, "ahead": ahead},
    )


@pytest.fixture(scope="module")
def mortal_lab(mortal_node, model):
    return Lab(mortal_node, model)


def done_ahead(finished) -> set[str]:
    return {row["task"] for row in finished.timeline} & AHEAD


async def without(lab, schedule) -> Finished:
    name = f"without-{schedule}"
    (finished,) = await lab.succeeded({name: wanted(lab, schedule, ahead=False)})
    return finished


@pytest.mark.parametrize("schedule", list(Schedule))
async def test_the_result_is_the_same_without(mortal_lab, schedule):
    expected = await without(mortal_lab, schedule)
    (found,) = await mortal_lab.succeeded({f"with-{schedule}": wanted(mortal_lab, schedule)})
    assert different(expected.tensors, found.tensors) == []
    assert done_ahead(expected) == set()
    assert Task.AHEAD_PREPARE in done_ahead(found)


async def test_without_room_nothing_is_kept(mortal_lab):
    expected = await without(mortal_lab, Schedule.FUSED)
    asked = wanted(mortal_lab, Schedule.FUSED, ahead_mib=0)
    (found,) = await mortal_lab.succeeded({"no-room": asked})
    assert different(expected.tensors, found.tensors) == []
    assert done_ahead(found) == set()


async def test_serial_and_rollplex_stay_equal(mortal_lab):
    serial, rollplex = await mortal_lab.succeeded(
        {f"with-{s}": wanted(mortal_lab, s) for s in (Schedule.SERIAL, Schedule.ROLLPLEX)}
    )
    assert different(serial.tensors, rollplex.tensors) == []
    assert done_ahead(serial) == {Task.AHEAD_PREPARE}


@asynccontextmanager
async def running(lab, name, asked):
    """A run to be looked into; yields what does it, and what the run has come to at the end."""
    ended = []
    async with lab.node.client() as client:
        run = await client.create_run(asked, run_dir=lab.folder / name)
        async with Striker(lab.node, client, run) as striker:
            waiting = asyncio.create_task(client.wait_run(run.run_id, patience=PATIENCE))
            yield striker, ended
            run = await waiting
    assert run.state is RunState.SUCCEEDED, run.reason
    ended.append(Finished(run=run, folder=Path(run.run_dir)))
    async with lab.node.broker() as stub:
        assert await lab.node.entries(stub, run.run_id) == []


async def all_done_ahead(striker, tasks) -> None:
    """Wait until everything of the next step is done that may be."""

    async def done() -> bool:
        counted = Counter(e.body.task for e in striker.seen.of_epoch(bodies.AheadDone))
        return all(counted[task] == GROUPS for task in tasks)

    await until(done)


@pytest.mark.parametrize("schedule", OVERLAPPED)
async def test_what_was_done_ahead_is_not_done_again(mortal_lab, schedule):
    expected = await without(mortal_lab, schedule)
    asked = wanted(mortal_lab, schedule)
    making = running(mortal_lab, f"held-{schedule}", asked)
    async with making as (striker, ended), striker.window_held(hinted=True):
        held = striker.seen.step
        await all_done_ahead(striker, AHEAD)
    assert different(expected.tensors, ended[0].tensors) == []
    rows = ended[0].timeline
    ahead = Counter(row["task"] for row in rows if row["step"] == held)
    assert [ahead[task] for task in sorted(AHEAD)] == [GROUPS] * 3
    following = {row["task"] for row in rows if row["step"] == held + 1}
    assert following.isdisjoint({Task.POLICY_VISION, Task.REFERENCE_PREFIX})
    assert {Task.PREPARE, Task.POLICY_PREFIX, Task.REFERENCE_SCORE} <= following


async def test_a_tower_that_trains_is_not_run_ahead(mortal_lab):
    asked = wanted(mortal_lab, Schedule.FUSED, train_vision=True)
    making = running(mortal_lab, "trained-tower", asked)
    async with making as (striker, ended), striker.window_held(hinted=True):
        held = striker.seen.step
        await all_done_ahead(striker, AHEAD - {Task.AHEAD_VISION})
    rows = ended[0].timeline
    assert Task.AHEAD_VISION not in {row["task"] for row in rows}
    following = Counter(row["task"] for row in rows if row["step"] == held + 1)
    assert (following[Task.POLICY_VISION], following[Task.REFERENCE_PREFIX]) == (GROUPS, 0)


@pytest.mark.parametrize("victim", [ROLLOUT, ENCODER])
async def test_a_death_after_work_ahead_changes_nothing(mortal_lab, victim):
    expected = await without(mortal_lab, Schedule.FUSED)
    name = f"struck-{victim.replace('/', '-')}"
    asked = wanted(mortal_lab, Schedule.FUSED)
    async with (
        running(mortal_lab, name, asked) as (striker, ended),
        striker.window_held(hinted=True),
    ):
        held = striker.seen.step
        await all_done_ahead(striker, AHEAD)
        await kill(mortal_lab.node, victim)
    assert ended[0].run.restarts >= 1
    assert different(expected.tensors, ended[0].tensors) == []
    again = {row["task"] for row in ended[0].timeline if row["step"] == held} & AHEAD
    # What another process has died beside is still there for the attempt that counts.
    assert again == set() if victim is ROLLOUT else Task.AHEAD_PREPARE in again
