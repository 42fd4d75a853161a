"""The best next actions in a MiniGrid maze, by breadth-first search.

The search asks the environment itself what an action does, so walls, lava and whatever else the
environment has count as they do in an episode. Only the agent may move: environments with doors to
open or things to carry need a larger state than place and direction.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, TypeAlias

ACTIONS: tuple[str, ...] = ("left", "right", "forward")
"""Words for MiniGrid's first three actions, in its numbering."""

State: TypeAlias = tuple[int, int, int]
"""Column, row, direction."""


def best_actions(env: Any) -> tuple[str, ...]:
    """Actions that begin a shortest way to the goal from where the agent is.

    Args:
        env: a `MiniGridEnv`; it is left as it was.
    Returns: one word or several; none if the goal cannot be reached.
    """
    here, steps = _state(env), env.step_count
    try:
        following, goals = _explore(env, here)
    finally:
        _place(env, here)
        env.step_count = steps
    distance = _distances(following, goals)
    if here not in distance:
        return ()
    return tuple(
        word
        for word, state in zip(ACTIONS, following[here], strict=True)
        if state in distance and distance[state] == distance[here] - 1
    )


def _explore(env: Any, start: State) -> tuple[dict[State, list[State | None]], set[State]]:
    """What each action leads to from every state that can be reached, and which states win."""
    following: dict[State, list[State | None]] = {}
    goals: set[State] = set()
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        if state in following:
            continue
        following[state] = []
        if state in goals:
            continue
        for action in range(len(ACTIONS)):
            _place(env, state)
            env.step_count = 0
            _, reward, ended, _, _ = env.step(action)
            reached = _state(env)
            if ended and reward > 0:
                goals.add(reached)
            lost = ended and reward <= 0
            following[state].append(None if lost else reached)
            if not lost:
                waiting.append(reached)
    return following, goals


def _distances(following: dict[State, list[State | None]], goals: set[State]) -> dict[State, int]:
    """Number of actions from each state to the nearest goal."""
    before: dict[State, list[State]] = defaultdict(list)
    for state, reached in following.items():
        for other in reached:
            if other is not None:
                before[other].append(state)
    distance = dict.fromkeys(goals, 0)
    waiting = deque(goals)
    while waiting:
        state = waiting.popleft()
        for other in before[state]:
            if other not in distance:
                distance[other] = distance[state] + 1
                waiting.append(other)
    return distance


def _state(env: Any) -> State:
    column, row = env.agent_pos
    return int(column), int(row), int(env.agent_dir)


def _place(env: Any, state: State) -> None:
    env.agent_pos = (state[0], state[1])
    env.agent_dir = state[2]
