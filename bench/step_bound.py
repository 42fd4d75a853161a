"""How short a step could be: what the co-run rates allow, from the serial step's own times.

With the serial step's median times (S the step, W its window, all others of phases):

- A schedule may leave work out. `fused` has no prefill of the engine's own: less
  min(admission, policy prefixes).
- A schedule may move work into the window. `rollplex`: both roles' prefixes, and the vision of the
  next step's prompts where the tower is frozen. `fused`: the same without the policy's prefixes;
  and scores, training and prefix backward of a group, 1/N of their times each, once its last
  response has ended.
- Beside r decoding sequences, a share of the SMs gives the decode the rate d and the background
  the rate p, each over its rate alone. A second beside each other then saves d + p - 1 seconds.
  The set lengths say which of the window's iterations have how many sequences, and how many groups
  have ended by then; iterations count as equally long.

The most that can be saved is a linear program a step: seconds on every share in every part of the
window, such that no more decode and no more background work is done than there is by then. The mean
of the steps counts.

    bound = S - left out - most that can be saved
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import linprog

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.governor.table import CoRun, CoRunTable

SERIAL = "serial"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPart:
    """Iterations with equally many sequences.

    Attributes:
        rows: sequences that decode.
        ended: groups whose last response has ended before.
        iterations: how many.
    """

    rows: int
    ended: int
    iterations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Seconds of a serial step that a schedule leaves out, or may move.

    Attributes:
        anywhere_s: that may run in the whole window.
        of_groups_s: of all groups; a group's share may run once the group has ended.
    """

    left_out_s: float = 0.0
    anywhere_s: float = 0.0
    of_groups_s: float = 0.0


def window_parts(groups: Sequence[Sequence[int]]) -> tuple[WindowPart, ...]:
    """The window of a step, in order, all sequences admitted at once.

    Args:
        groups: response lengths by group, at least one each.
    """
    lengths = [length for group in groups for length in group]
    ends = [max(group) for group in groups]

    def at(iteration: int) -> tuple[int, int]:
        rows = sum(length > iteration for length in lengths)
        return rows, sum(end <= iteration for end in ends)

    alike = groupby(range(max(lengths)), key=at)
    return tuple(
        WindowPart(rows=rows, ended=ended, iterations=len(list(iterations)))
        for (rows, ended), iterations in alike
    )


def bound_s(
    schedule: str,
    serial: Mapping[str, float],
    *,
    table: CoRunTable,
    windows: Sequence[Sequence[WindowPart]],
    prompts: int,
    train_vision: bool,
) -> float:
    """Seconds of the shortest step; see the module's text.

    Args:
        schedule: `serial` and whatever is not known here are bounded by the serial step itself.
        serial: `step_s`, `window_s` and the phases `time_*_s` of the serial step.
        windows: of `window_parts`, of one or more steps.
        prompts: N.
        train_vision: whether the vision tower is trained, so that its work cannot go ahead.
    """
    work = _work(schedule, serial, train_vision=train_vision)
    saved_s = [
        _most_saved_s(window, work, table=table, window_s=serial["window_s"], prompts=prompts)
        for window in windows
    ]
    return serial["step_s"] - work.left_out_s - float(np.mean(saved_s))


def _most_saved_s(
    window: Sequence[WindowPart],
    work: _Work,
    *,
    table: CoRunTable,
    window_s: float,
    prompts: int,
) -> float:
    """Seconds on a share are one variable for either kind of work: anywhere, then of groups."""
    shares: list[tuple[int, CoRun]] = [
        (place, entry) for place, part in enumerate(window) for entry in table.beside(part.rows)
    ]
    parts, columns = len(window), len(shares)
    iterations = sum(part.iterations for part in window)
    decode_PC, done_PC = np.zeros((parts, columns)), np.zeros((parts, columns))
    for column, (place, entry) in enumerate(shares):
        decode_PC[place, column] = entry.decode_rate
        # What is done in a part is done in all that follow.
        done_PC[place:, column] = entry.background_rate
    nothing_PC = np.zeros((parts, columns))
    saved = linprog(
        [1.0 - entry.gain for _, entry in shares] * 2,
        A_ub=np.vstack(
            [
                np.hstack([decode_PC, decode_PC]),
                np.hstack([nothing_PC, done_PC]),
                np.hstack([done_PC[-1:], nothing_PC[-1:]]),
            ]
        ),
        b_ub=[
            *(window_s * part.iterations / iterations for part in window),
            *(work.of_groups_s * part.ended / prompts for part in window),
            work.anywhere_s,
        ],
    )
    return float(-saved.fun)


def _work(schedule: str, serial: Mapping[str, float], *, train_vision: bool) -> _Work:
    def time_s(*phases: str) -> float:
        return sum(serial.get(f"time_{phase}_s", 0.0) for phase in phases)

    ahead_s = 0.0 if train_vision else time_s("policy_vision")
    if schedule == "rollplex":
        return _Work(anywhere_s=ahead_s + time_s("policy_prefix", "reference_prefix"))
    if schedule == "fused":
        return _Work(
            left_out_s=min(time_s("admit"), time_s("policy_prefix")),
            anywhere_s=ahead_s + time_s("reference_prefix"),
            of_groups_s=time_s("reference_score", "response_train", "prefix_backward"),
        )
    return _Work()
