"""When the reference's weights are needed, from the events of a step."""

from __future__ import annotations

import pytest

from common.events import bodies
from common.step.plan import StepMode
from common.step.reference_use import reference_weights_needed
from common.step.schedule import Schedule
from common.step.view import StepView
from tests.unit.step.test_schedule import REWARDED, SCORED, event, generated, plan

GROUPS = 8
OVERLAPPED = (Schedule.ROLLPLEX, Schedule.FUSED)
DROPPED = bodies.GroupDropped(code="bad", reason="a test", sample=0)
CLOSED = bodies.WindowClosed(decode_iterations=1, response_tokens=1)


def view_of(schedule, mode=StepMode.TRAIN, *, needs_reference=True) -> StepView:
    return StepView(plan(schedule, groups=GROUPS, mode=mode), needs_reference=needs_reference)


def roll_out(view, *groups) -> None:
    for group in groups:
        for body in (generated(), REWARDED):
            assert view.apply(event(body, group))


@pytest.mark.parametrize("schedule", OVERLAPPED)
def test_in_the_window_they_are_needed_from_the_beginning(schedule):
    view = view_of(schedule)
    assert reference_weights_needed(view)
    view.apply(event(bodies.WindowOpened()))
    roll_out(view, *range(GROUPS))
    assert reference_weights_needed(view)


def test_after_the_window_they_are_needed_from_its_last_groups_on():
    view = view_of(Schedule.SERIAL)
    assert not reference_weights_needed(view)
    view.apply(event(bodies.WindowOpened()))
    roll_out(view, *range(GROUPS - 3))
    assert not reference_weights_needed(view)
    roll_out(view, GROUPS - 3)
    assert reference_weights_needed(view)


def test_one_group_is_the_last_of_few():
    view = StepView(plan(Schedule.SERIAL, groups=2), needs_reference=True)
    assert not reference_weights_needed(view)
    view.apply(event(DROPPED, 0))
    assert reference_weights_needed(view)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_they_go_when_the_last_group_is_scored(schedule):
    view = view_of(schedule)
    view.apply(event(bodies.WindowOpened()))
    roll_out(view, *range(GROUPS))
    for group in range(GROUPS):
        assert reference_weights_needed(view)
        view.apply(event(SCORED, group))
    # Work ahead may read them until the window has closed.
    assert reference_weights_needed(view)
    view.apply(event(CLOSED))
    assert not reference_weights_needed(view)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_nothing_is_scored_of_groups_that_are_all_dropped(schedule):
    view = view_of(schedule)
    for group in range(GROUPS):
        view.apply(event(DROPPED, group))
    assert not reference_weights_needed(view)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_step_that_scores_nothing_needs_none(schedule):
    assert not reference_weights_needed(view_of(schedule, StepMode.EVAL))
    assert not reference_weights_needed(view_of(schedule, needs_reference=False))
