"""How short a step could be: what the co-run rates allow, from the serial step's own times.

With the serial step's median times (S the step, W its window, all others of phases):

- A schedule may leave work out. `fused` has no prefill of the engine's own: less
  min(admission, policy prefixes).
- A schedule may move work into the window. `rollplex`: both roles' prefixes. `fused`: reference
  prefixes and scores, and training and prefix backward of all groups but the last of N,
  (N - 1) / N of them. Call its time, run alone, M.
- Beside r decoding sequences, the best share gives the background the rate b and the decode the
  rate g - b (g: the co-run table's gain, b: its background rate). The decode that takes w alone
  then takes w / (g - b), and b w / (g - b) of M is done meanwhile: each second of M that is moved
  saves (g - 1) / b seconds. Iterations count as equally long; the set lengths say how many have
  how many sequences. M fills the iterations that save most first.

    bound = S - left out - sum over iterations of (moved there) (g - 1) / b
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

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
) -> float:
    """Seconds of the shortest step; see the module's text.

    Args:
        schedule: `serial` and whatever is not known here are bounded by the serial step itself.
        serial: `step_s`, `window_s` and the phases `time_*_s` of the serial step.
        occupied: of `occupancy`, of one or more steps.
        prompts: N.
    """
    step_s = serial["step_s"]
    left_out_s, movable_s = _work(schedule, serial, prompts)
    iterations = sum(occupied.values())
    if not iterations:
        return step_s - left_out_s
    parts: Counter[CoRun] = Counter()
    for rows, count in occupied.items():
        parts[table.best(rows)] += count
    saved_s = 0.0
    for entry, count in sorted(parts.items(), key=lambda part: -_saving(part[0])):
        alone_s = serial["window_s"] * count / iterations
        moved_s = min(movable_s, entry.background_rate * alone_s / entry.decode_rate)
        saved_s += moved_s * max(0.0, _saving(entry))
        movable_s -= moved_s
    return step_s - left_out_s - saved_s


def _saving(entry: CoRun) -> float:
    return (entry.gain - 1.0) / entry.background_rate


def _work(schedule: str, serial: Mapping[str, float], prompts: int) -> tuple[float, float]:
    """Seconds that are left out, and that may be moved."""

    def time_s(*phases: str) -> float:
        return sum(serial.get(f"time_{phase}_s", 0.0) for phase in phases)

    if schedule == "rollplex":
        return 0.0, time_s("policy_prefix", "reference_prefix")
    if schedule == "fused":
        trained_s = time_s("response_train", "prefix_backward") * (prompts - 1) / prompts
        left_out_s = min(time_s("admit"), time_s("policy_prefix"))
        return left_out_s, time_s("reference_prefix", "reference_score") + trained_s
    return 0.0, 0.0
