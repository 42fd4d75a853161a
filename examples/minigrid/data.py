"""Videos of the last moments of a random walk in a MiniGrid maze, with the best actions to follow.

Row i is a function of i alone: the maze, the walk, and the moment at which it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import gymnasium
import minigrid  # noqa: F401 - registers the environments
import numpy as np

from examples.minigrid.planner import ACTIONS, best_actions

ENVIRONMENT = "MiniGrid-Empty-Random-6x6-v0"
QUESTION = "Which action is best now: left, right or forward?"
FRAMES = 4
FRAMES_PER_SECOND = 2.0
TILE_PIXELS = 14
"""Edge of a cell of the maze, which makes it one patch of the vision tower."""
LONGEST_WALK = 12
TRAIN_ROWS = 2000
HELD_OUT_ROWS = 200

_HELD_OUT_SEED = 1_000_000
"""Seeds from here on are never trained on."""


class Episodes(Sequence[dict[str, Any]]):
    """Rows with one video and the field ``best``, the list of right answers."""

    def __init__(self, *, first_seed: int, rows: int) -> None:
        """Row i is the episode of seed ``first_seed + i``."""
        self._first_seed = first_seed
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        if not 0 <= index < self._rows:
            raise IndexError(f"row {index} of {self._rows}")
        seed = self._first_seed + index
        frames, best = walk(seed)
        content = [
            {"type": "video", "video": frames, "fps": FRAMES_PER_SECOND},
            {"type": "text", "text": QUESTION},
        ]
        return {
            "messages": [{"role": "user", "content": content}],
            "best": list(best),
            "episode_seed": seed,
        }


def train() -> Episodes:
    """The episodes to learn from."""
    return Episodes(first_seed=0, rows=TRAIN_ROWS)


def held_out() -> Episodes:
    """Episodes that training never sees."""
    return Episodes(first_seed=_HELD_OUT_SEED, rows=HELD_OUT_ROWS)


def tokenizer_texts() -> list[str]:
    """What the tokenizer of the small model learns its merges from."""
    return [QUESTION, *ACTIONS]


def walk(seed: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Walk at random and stop before the goal.

    Returns: the last frames, [FRAMES, height, width, 3] uint8, where the first frame is repeated if
        the walk was shorter; and the best actions after the last of them.
    """
    env = _environment()
    env.reset(seed=seed)
    choice = np.random.default_rng(seed)
    frames = [_picture(env)]
    for _ in range(int(choice.integers(LONGEST_WALK))):
        before = (env.agent_pos, env.agent_dir)
        _, _, ended, _, _ = env.step(int(choice.integers(len(ACTIONS))))
        if ended:
            env.agent_pos, env.agent_dir = before
            break
        frames.append(_picture(env))
    missing = max(FRAMES - len(frames), 0)
    last = [frames[0]] * missing + frames[-FRAMES:]
    return np.stack(last), best_actions(env)


@cache
def _environment() -> Any:
    return gymnasium.make(ENVIRONMENT).unwrapped


def _picture(env: Any) -> np.ndarray:
    return np.asarray(env.get_frame(highlight=False, tile_size=TILE_PIXELS), dtype=np.uint8)
