"""How short a step could be: what the co-run rates allow, from the serial step's own times.

With the serial step's median times (S the step, W its window, all others of phases):

- A schedule may leave work out. `fused` has no prefill of the engine's own: less
  min(admission, policy prefixes).
- A schedule may move work into the window. `rollplex`: both roles' prefixes, and the vision of the
  next step's prompts where the tower is frozen. `fused`: the same without the policy's prefixes,
  reference scores, and training and prefix backward of all groups but the last of N, (N - 1) / N
  of them. Call its time, run alone, M.
- Beside r decoding sequences, a share of the SMs gives the decode the rate d and the background
  the rate p, each over its rate alone. A second beside each other then saves d + p - 1 seconds.
  The set lengths say how many of the window's iterations have how many sequences; iterations count
  as equally long.

The most that can be saved is a linear program: seconds on every share beside every number of
sequences, such that no more decode and no more background work is done than there is.

    bound = S - left out - most that can be saved
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import linprog

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.governor.table import CoRun, CoRunTable

SERIAL = "serial"


def occupancy(lengths: Sequence[int]) -> Counter[int]:
    """Iterations by the number of sequences that decode in them, all admitted at once."""
    ends = sorted(lengths, reverse=True)
    rows = (sum(1 for length in ends if length > i) for i in range(ends[0] if ends else 0))
    return Counter(rows)


def bound_s(
    schedule: str,
    serial: Mapping[str, float],
    *,
    table: CoRunTable,
    occupied: Mapping[int, int],
    prompts: int,
    train_vision: bool,
) -> float:
    """Seconds of the shortest step; see the module's text.

    Args:
        schedule: `serial` and whatever is not known here are bounded by the serial step itself.
        serial: `step_s`, `window_s` and the phases `time_*_s` of the serial step.
        occupied: of `occupancy`, of one or more steps.
        prompts: N.
        train_vision: whether the vision tower is trained, so that its work cannot go ahead.
    """
    left_out_s, movable_s = _work(schedule, serial, prompts, train_vision=train_vision)
    iterations = sum(occupied.values())
    shares: list[tuple[int, CoRun]] = []
    decodes_s: list[float] = []
    for row, (rows, count) in enumerate(sorted(occupied.items())):
        decodes_s.append(serial["window_s"] * count / iterations)
        shares += [(row, entry) for entry in table.beside(rows)]
    saved_s = _most_saved_s(shares, decodes_s, movable_s) if movable_s else 0.0
    return serial["step_s"] - left_out_s - saved_s


def _most_saved_s(
    shares: Sequence[tuple[int, CoRun]], decodes_s: Sequence[float], movable_s: float
) -> float:
    """Args: shares: part of the window, and rates on one share beside it. decodes_s: by part."""
    if not shares:
        return 0.0
    limits = np.zeros((len(decodes_s) + 1, len(shares)))
    for column, (row, entry) in enumerate(shares):
        limits[row, column] = entry.decode_rate
        limits[-1, column] = entry.background_rate
    saved = linprog(
        [1.0 - entry.gain for _, entry in shares], A_ub=limits, b_ub=[*decodes_s, movable_s]
    )
    return float(-saved.fun)


def _work(
    schedule: str, serial: Mapping[str, float], prompts: int, *, train_vision: bool
) -> tuple[float, float]:
    """Seconds that are left out, and that may be moved."""

    def time_s(*phases: str) -> float:
        return sum(serial.get(f"time_{phase}_s", 0.0) for phase in phases)

    ahead_s = 0.0 if train_vision else time_s("policy_vision")
    if schedule == "rollplex":
        return 0.0, ahead_s + time_s("policy_prefix", "reference_prefix")
    if schedule == "fused":
        trained_s = time_s("response_train", "prefix_backward") * (prompts - 1) / prompts
        left_out_s = min(time_s("admit"), time_s("policy_prefix"))
        moved_s = ahead_s + trained_s + time_s("reference_prefix", "reference_score")
        return left_out_s, moved_s
    return 0.0, 0.0
