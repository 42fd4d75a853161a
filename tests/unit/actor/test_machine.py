from __future__ import annotations

from enum import Enum

import pytest

from common.actor import InvalidTransition, StateCell, TransitionTable
from common.actor.actor import TRANSITIONS as ACTOR
from common.actor.actor import ActorState
from common.service.lifecycle import TRANSITIONS as SERVICE
from common.service.lifecycle import Lifecycle


class Door(Enum):
    OPEN = "open"
    CLOSED = "closed"
    LOCKED = "locked"


DOORS = TransitionTable(
    "door",
    {
        (Door.OPEN, Door.CLOSED): "a push",
        (Door.CLOSED, Door.OPEN): "a pull",
        (Door.CLOSED, Door.LOCKED): "a key",
    },
)


def test_legal_moves_change_the_state():
    cell = StateCell(DOORS, 7, Door.OPEN)
    cell.move(Door.CLOSED, "a push")
    cell.move(Door.LOCKED, "a key")
    assert cell.state is Door.LOCKED
    assert cell.story.lines() == ("OPEN -> CLOSED (a push)", "CLOSED -> LOCKED (a key)")


def test_illegal_move_tells_key_states_and_story_and_changes_nothing():
    cell = StateCell(DOORS, 7, Door.OPEN)
    cell.move(Door.CLOSED, "wind")
    cell.move(Door.LOCKED, "habit")
    with pytest.raises(InvalidTransition) as caught:
        cell.move(Door.OPEN, "force")
    error = caught.value
    assert (error.key, error.start, error.finish) == (7, Door.LOCKED, Door.OPEN)
    assert str(error) == (
        "door 7: no transition LOCKED -> OPEN. Story: OPEN -> CLOSED (wind); "
        "CLOSED -> LOCKED (habit)"
    )
    assert cell.state is Door.LOCKED


def test_story_is_bounded():
    cell = StateCell(DOORS, 7, Door.OPEN, limit=2)
    for _ in range(3):
        cell.move(Door.CLOSED, "push")
        cell.move(Door.OPEN, "pull")
    assert cell.story.lines() == ("OPEN -> CLOSED (push)", "CLOSED -> OPEN (pull)")


def test_markdown_has_a_row_for_each_move():
    assert DOORS.markdown().splitlines()[2:] == [
        "| OPEN | CLOSED | a push |",
        "| CLOSED | OPEN | a pull |",
        "| CLOSED | LOCKED | a key |",
    ]


@pytest.mark.parametrize(
    ("table", "states", "first", "last"),
    [
        (ACTOR, ActorState, ActorState.CREATED, {ActorState.STOPPED, ActorState.FAILED}),
        (SERVICE, Lifecycle, Lifecycle.CREATED, {Lifecycle.STOPPED, Lifecycle.FAILED}),
    ],
)
def test_every_state_is_reached_and_only_the_ends_have_no_way_on(table, states, first, last):
    reached = {finish for _, finish in table.moves}
    left = {start for start, _ in table.moves}
    assert reached | {first} == set(states)
    assert set(states) - left == last
