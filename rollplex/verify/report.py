"""All measurements of a verification, and whether they are what they must be."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollplex.verify.node import run_module, temporary_node
from rollplex.verify.schedules import compare_schedules

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CPU_LIMITS: Mapping[str, float] = {
    "split_vs_monolithic_rel_grad_diff_f64": 1e-8,
    "logprob_diff_f32": 1e-5,
    "decode_logit_diff_f32": 1e-5,
    "disaggregated_engine_logprob_diff": 1e-5,
    "serial_vs_fused_rel_diff": 1e-5,
    "fused_engine_logprob_diff": 1e-5,
}
"""Largest legal values on a CPU."""
CUDA_LIMITS: Mapping[str, float] = {
    "split_vs_monolithic_rel_grad_diff_f64": 1e-8,
    "logprob_diff_f32": 1e-4,
    "decode_logit_diff_f32": 1e-4,
    "serial_vs_rollplex_rel_diff": 1e-4,
    "serial_vs_fused_rel_diff": 1e-4,
    "fused_engine_logprob_diff": 1e-4,
}
"""Largest legal values on a GPU, where sums are taken in other orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was measured.

    Attributes:
        device: what it was measured on.
        values: by name; see the limits above and `rollplex.verify.schedules.ScheduleReport`.
    """

    device: str
    values: Mapping[str, float | bool | Mapping[str, float] | None]

    @property
    def failures(self) -> tuple[str, ...]:
        """One line for each measurement that is not what it must be."""
        limits = CPU_LIMITS if self.device == "cpu" else CUDA_LIMITS
        found = [
            f"{name} = {self.values[name]:.3g}, legal is less than {limit:g}"
            for name, limit in limits.items()
            if not float(self.values[name]) < limit  # type: ignore[arg-type]
        ]
        found += [
            f"serial and {schedule} did not end with the same bits"
            for schedule in ("disaggregated", "rollplex")
            if self.device == "cpu" and self.values[f"serial_vs_{schedule}_bitwise"] is not True
        ]
        return tuple(found)

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps({**self.values, "passed": not self.failures}, indent=2)


def _nothing(_: str) -> None:
    """For `verify`."""


async def verify(
    *, device: str = "cpu", keep: Path | None = None, say: Callable[[str], object] = _nothing
) -> VerifyReport:
    """Measure everything on this machine, in services of its own.

    Args:
        device: what the split pass and the workers compute on.
        keep: folder to leave runs and logs in; None: a temporary one.
        say: told what comes next; the whole takes minutes.
    """
    if keep is not None:
        return await _verify(device, keep, say)
    with tempfile.TemporaryDirectory(prefix="rollplex-verify-") as folder:
        return await _verify(device, Path(folder), say)


async def _verify(device: str, folder: Path, say: Callable[[str], object]) -> VerifyReport:
    say("the split pass against an unmodified model")
    split = json.loads(await run_module("common.vlm.verify_split", "--device", device))
    model = folder / "model"
    spec = Path(__file__).with_name("model.toml")
    await run_module("rollplex.cli", "init-model", str(spec), str(model))
    async with temporary_node(folder / "node", device=device) as address:
        schedules = await compare_schedules(address, folder / "runs", model, device=device, say=say)
    return VerifyReport(
        device=device,
        values={
            **split,
            "serial_vs_disaggregated_bitwise": schedules.serial_vs_disaggregated_bitwise,
            "disaggregated_engine_logprob_diff": schedules.disaggregated_engine_logprob_diff,
            "serial_vs_rollplex_bitwise": schedules.serial_vs_rollplex_bitwise,
            "serial_vs_rollplex_rel_diff": schedules.serial_vs_rollplex_rel_diff,
            "serial_vs_fused_rel_diff": schedules.serial_vs_fused_rel_diff,
            "fused_engine_logprob_diff": schedules.fused_engine_logprob_diff,
            "prefix_overlap_fraction": schedules.prefix_overlap_fraction,
        },
    )
