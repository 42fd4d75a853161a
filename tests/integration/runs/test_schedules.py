"""All schedules make the same update, and differ in what lies inside the decode window."""

from __future__ import annotations

from collections import Counter

import pytest

from common.step.schedule import Schedule
from common.step.tasks import AHEAD, WEIGHTS_DEPENDENT, Task
from tests.integration.runs.recipes import different, recipe, relative_difference

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(240)]

STEPS = 3
GROUPS = 4


@pytest.fixture
async def schedules(lab):
    """Finished runs by schedule; `fused` was fed the responses that `serial` sampled."""
    recorded = recipe(lab.model, Schedule.SERIAL, training={"record_responses": True})
    sampling = (Schedule.DISAGGREGATED, Schedule.ROLLPLEX)
    wanted = {"serial": recorded} | {str(s): recipe(lab.model, s) for s in sampling}
    serial, *others = await lab.succeeded(wanted)
    replay = {"replay_from": str(serial.folder)}
    (fused,) = await lab.succeeded({"fused": recipe(lab.model, Schedule.FUSED, training=replay)})
    return {
        Schedule.SERIAL: serial,
        Schedule.FUSED: fused,
        **dict(zip(sampling, others, strict=True)),
    }


@pytest.mark.parametrize("schedule", [Schedule.DISAGGREGATED, Schedule.ROLLPLEX])
async def test_schedules_that_sample_the_same_end_with_the_same_bits(schedules, schedule):
    serial = schedules[Schedule.SERIAL].tensors
    assert {"masters", "moments"} < serial.keys()
    assert different(serial, schedules[schedule].tensors) == []


async def test_fused_makes_the_same_update_of_the_same_responses(schedules):
    difference = relative_difference(
        schedules[Schedule.SERIAL].tensors, schedules[Schedule.FUSED].tensors
    )
    assert difference <= 1e-5
    for step in schedules[Schedule.FUSED].steps:
        assert step["metrics"]["mismatch_abs_max"] < 1e-5


async def test_prefix_work_lies_in_the_window_where_the_schedule_says_so(schedules):
    shares = {
        schedule: [step["metrics"]["prefix_overlap_fraction"] for step in finished.steps]
        for schedule, finished in schedules.items()
    }
    assert shares[Schedule.SERIAL] == [0.0] * STEPS
    assert all(share > 0 for share in shares[Schedule.ROLLPLEX])
    # The last step's may all have been done in the window of the one before.
    assert all(share > 0 for share in shares[Schedule.FUSED][:-1])


@pytest.mark.parametrize("schedule", list(Schedule))
async def test_nothing_that_reads_weights_runs_ahead_of_the_update(schedules, schedule):
    timeline = schedules[schedule].timeline
    updates = {row["step"]: row["end_ns"] for row in timeline if row["task"] == Task.UPDATE}
    assert sorted(updates) == list(range(STEPS))
    dependent = [row for row in timeline if row["task"] in WEIGHTS_DEPENDENT and row["step"] > 0]
    assert {row["task"] for row in dependent} == set(WEIGHTS_DEPENDENT)
    for row in dependent:
        assert row["start_ns"] >= updates[row["step"] - 1]


@pytest.mark.parametrize("schedule", list(Schedule))
async def test_every_group_is_worked_on_once(schedules, schedule):
    timeline = schedules[schedule].timeline
    for task in set(Task) - AHEAD - {Task.UPDATE, Task.REFERENCE_PREFIX}:
        done = [(row["step"], row["group"]) for row in timeline if row["task"] == task]
        assert sorted(done) == [(s, g) for s in range(STEPS) for g in range(GROUPS)], task
    references = Counter(r["step"] for r in timeline if r["task"] == Task.REFERENCE_PREFIX)
    references.update(r["step"] + 1 for r in timeline if r["task"] == Task.AHEAD_REFERENCE)
    assert references == dict.fromkeys(range(STEPS), GROUPS)
