"""How fast contents leave the device and come back, beside a plain copy of pinned memory."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_GB = 1e9
_COPIED_BYTES = 1 << 30
_REPEATS = 5
_MOVES = (
    ("policy_optimizer", "spill", "spilled", "to_host"),
    ("policy_optimizer", "restore", "restored", "to_device"),
    ("reference_weights", "restore", "restored", "to_device"),
)
"""What moves, its names in the metrics, and the direction of the plain copy. Reference weights
leave without one: their copy is made once."""


def pinned_copies() -> dict[str, float]:
    """Plain copies of 1 GiB between pinned memory and the first GPU, in GB/s.

    Returns: `to_host` and `to_device`, medians of a few. Blocks until the device is idle.
    """
    import torch

    pinned = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    return {"to_host": _rate(device, pinned), "to_device": _rate(pinned, device)}


def move_figures(
    metrics: Mapping[str, Any], plain: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Rates of a run's moves in GB/s, and their shares of a plain copy's.

    Args:
        metrics: of a step; what did not move in it has no rate.
        plain: of `pinned_copies`; None: no shares.
    """
    found: dict[str, float] = {}
    for contents, move, moved, direction in _MOVES:
        moved_bytes = metrics.get(f"{contents}_{moved}_bytes", 0.0)
        seconds = metrics.get(f"time_{contents}_{move}_s", 0.0)
        if not (moved_bytes and seconds):
            continue
        name = f"{contents}_{move}"
        found[f"{name}_gb_per_s"] = moved_bytes / seconds / _GB
        if plain is not None:
            found[f"{name}_over_pinned"] = found[f"{name}_gb_per_s"] / plain[direction]
    return found


def _rate(source: Tensor, target: Tensor) -> float:
    import torch

    rates = []
    for _ in range(1 + _REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        rates.append(_COPIED_BYTES / (begin.elapsed_time(end) / 1e3) / _GB)
    return statistics.median(rates[1:])
