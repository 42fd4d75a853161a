"""The maze task; the environment's own dynamics judge its planner."""

from __future__ import annotations

from collections import Counter

import gymnasium
import minigrid
import numpy as np
import pytest

from examples.minigrid import data, reward
from examples.minigrid.planner import ACTIONS, best_actions


@pytest.fixture
def room():
    """4 x 4 free cells, columns and rows 1 to 4; the goal is at (4, 4)."""
    env = gymnasium.make("MiniGrid-Empty-6x6-v0").unwrapped
    env.reset(seed=0)
    return env


def place(env, column, row, direction):
    env.agent_pos, env.agent_dir = (column, row), direction


@pytest.mark.parametrize(
    ("state", "best"),
    [
        ((1, 1, 0), {"forward"}),  # facing east, the goal is east and south
        ((4, 1, 1), {"forward"}),  # facing south, the goal is straight ahead
        ((4, 1, 0), {"right"}),  # facing the east wall
        ((1, 4, 1), {"left"}),  # facing the south wall
        ((1, 4, 2), {"left", "right"}),  # facing away: either half turn
        ((1, 1, 3), {"right"}),  # facing north: east is one turn away
        ((1, 1, 2), {"left"}),  # facing west: south is one turn away
    ],
)
def test_best_actions_in_an_empty_room(room, state, best):
    place(room, *state)
    assert set(best_actions(room)) == best


def test_planning_leaves_the_environment_as_it_was(room):
    place(room, 2, 3, 1)
    room.step_count = 5
    best_actions(room)
    assert (tuple(room.agent_pos), room.agent_dir, room.step_count) == ((2, 3), 1, 5)


@pytest.mark.parametrize("name", ["MiniGrid-Empty-Random-6x6-v0", "MiniGrid-LavaGapS5-v0"])
def test_following_the_plan_always_reaches_the_goal(name):
    env = gymnasium.make(name).unwrapped
    for seed in range(10):
        env.reset(seed=seed)
        ended, earned, actions = False, 0.0, 0
        while not ended and actions < 25:
            _, earned, ended, _, _ = env.step(ACTIONS.index(best_actions(env)[-1]))
            actions += 1
        assert ended
        assert earned > 0


def test_a_goal_out_of_reach_has_no_best_action(room):
    for column in range(1, 5):
        room.grid.set(column, 3, minigrid.core.world_object.Wall())
    place(room, 1, 1, 0)
    assert best_actions(room) == ()


def test_rows_are_functions_of_their_number():
    split = data.train()
    other = data.train()
    other[3]
    for index in (0, 7):
        row, again = split[index], other[index]
        video = row["messages"][0]["content"][0]
        assert video["video"].shape == (4, 84, 84, 3)
        assert video["fps"] == 2.0
        assert (video["video"] == again["messages"][0]["content"][0]["video"]).all()
        assert row["best"] == again["best"]
    seeds = {data.held_out()[i]["episode_seed"] for i in range(5)}
    assert seeds.isdisjoint(range(len(split)))
    with pytest.raises(IndexError):
        split[len(split)]


def test_every_row_has_an_answer_and_none_is_nearly_always_right():
    rows = [data.train()[i] for i in range(60)]
    assert all(row["best"] for row in rows)
    counts = Counter(word for row in rows for word in row["best"])
    assert set(counts) == set(ACTIONS)
    assert max(counts.values()) < 45


def test_videos_move():
    moving = 0
    for index in range(20):
        frames = data.train()[index]["messages"][0]["content"][0]["video"]
        moving += bool((np.diff(frames.astype(int), axis=0) != 0).any())
    assert moving > 12


@pytest.mark.parametrize(
    ("completion", "right", "form"),
    [("left", 1, 1), (" forward ", 1, 1), ("right", 0, 1), ("up", 0, 0), ("", 0, 0)],
)
def test_rewards(completion, right, form):
    row = {"best": ["left", "forward"]}
    assert reward.best_action(completion, row) == right
    assert reward.is_action(completion, row) == form
