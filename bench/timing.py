"""Timing of device work, and a list of cases of which none can end the others."""

from __future__ import annotations

import json
import statistics
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds of one piece of work.

    Attributes:
        median_ms, fastest_ms, slowest_ms: over the repeats.
        first_ms: the first call, with whatever is compiled or planned then.
    """

    median_ms: float
    fastest_ms: float
    slowest_ms: float
    first_ms: float


def measure(
    run: Callable[[Any], Any],
    *,
    device: torch.device,
    prepare: Callable[[], Any] = lambda: None,
    repeats: int = 10,
    warm_up: int = 2,
) -> Timing:
    """Time `run` on what `prepare` returns; only `run` is timed.

    On CUDA by events around the call, with the device idle before it, so that short calls show
    their launches too; elsewhere by the clock.
    """
    times = [_once(run, prepare(), device) for _ in range(1 + warm_up + repeats)]
    timed = times[1 + warm_up :]
    return Timing(
        median_ms=statistics.median(timed),
        fastest_ms=min(timed),
        slowest_ms=max(timed),
        first_ms=times[0],
    )


def measure_many(
    run: Callable[[int], Any], *, device: torch.device, calls: int = 20, repeats: int = 10
) -> float:
    """Median milliseconds of one of many calls in a row, which hides launches.

    Args:
        run: gets the call's number, to take turns among several inputs.
        device: where it runs.
        calls: in one timed region.
        repeats: regions.
    """

    def region(_: Any) -> None:
        for number in range(calls):
            run(number)

    return measure(region, device=device, repeats=repeats).median_ms / calls


def _once(run: Callable[[Any], Any], state: Any, device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        run(state)
        return (time.perf_counter() - begin) * 1e3
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin_event.record()
    run(state)
    end_event.record()
    torch.cuda.synchronize(device)
    return begin_event.elapsed_time(end_event)


@dataclass(slots=True, kw_only=True)
class Report:
    """Results of cases by name; a case that fails leaves its error and the others go on.

    Attributes:
        only: parts of names; empty means all cases.
        path: the JSON file that is written again after each case, or None.
    """

    only: tuple[str, ...]
    path: Path | None
    facts: dict[str, Any] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def case(self, name: str, run: Callable[[], dict[str, Any]]) -> None:
        """Run one case and keep its figures."""
        if self.only and not any(part in name for part in self.only):
            return
        begin = time.perf_counter()
        try:
            self.results[name] = run()
        except Exception as error:  # noqa: BLE001 - one failed case must not end the others
            self.errors[name] = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"--- {name} failed\n{traceback.format_exc()[-3000:]}", flush=True)
        shown = self.results.get(name, self.errors.get(name))
        print(f"{name} [{time.perf_counter() - begin:.1f} s]: {_short(shown)}", flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps(self.as_json(), indent=1))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def as_json(self) -> dict[str, Any]:
        """Everything so far."""
        return {"facts": self.facts, "results": self.results, "errors": self.errors}

    def table(self) -> str:
        """One line a case."""
        width = max((len(name) for name in self.results), default=0)
        lines = [f"{name:{width}}  {_short(found)}" for name, found in self.results.items()]
        return "\n".join([*lines, *(f"FAILED {n}: {e}" for n, e in self.errors.items())])


def facts(device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
    import transformers

    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def ceilings(device: torch.device, dtype: torch.dtype, size: int) -> dict[str, float]:
    """The two rates that nothing can beat: a large matrix product and a large copy.

    Returns: `tflops` of a `size` cubed product and `copy_tbs`, bytes read plus written.
    """
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product_ms = measure_many(lambda _: left @ right, device=device, calls=5)
    source = torch.randn(size * size * 16 if size > 4096 else size * size, device=device).to(dtype)
    target = torch.empty_like(source)
    copy_ms = measure_many(lambda _: target.copy_(source), device=device, calls=5)
    return {
        "tflops": 2 * size**3 / product_ms / 1e9,
        "copy_tbs": 2 * source.nbytes / copy_ms / 1e9,
    }


def _short(found: Any) -> str:
    if not isinstance(found, dict):
        return str(found)
    return "  ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in found.items()
    )
