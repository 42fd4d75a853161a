"""The measurement of whole steps, rehearsed on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from common.step.schedule import Schedule
from tests.unit.structure.source import ROOT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_schedule_is_measured_on_equal_work(tmp_path: Path) -> None:
    labels = ["serial", "serial-per-response", "serial-resident", *list(Schedule)[1:]]
    arguments = (
        f"--workload A2 --schedules {','.join(labels)} "
        "--steps 1 --warmup 1 --graphs 1 --scale tiny --device cpu --data-workers 1 "
        "--arena-gib 0.25 "
        f"--png {tmp_path}/steps.png --keep {tmp_path}/kept"
    )
    command = [sys.executable, "-m", "bench.step", *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["schedules"]
    assert list(found) == labels
    serial = found["serial"]
    assert serial["gain_over_serial"] == 1.0
    for name, figures in found.items():
        assert figures["steps"] == 1, name
        # the same prompts, weights, lengths and gradients, whatever was encoded twice
        assert figures["response_tokens"] == serial["response_tokens"], name
        assert figures["prompt_tokens"] == 3 * 64, name
        assert figures["gradient_norm"] == pytest.approx(serial["gradient_norm"], rel=1e-5), name
        assert 0 < figures["mfu"] < 1, name
        # one graph at a time: with `serial` every group's, else the first group's alone
        one_by_one = ("serial", "serial-per-response", "serial-resident", "disaggregated")
        kept = 3 if figures["schedule"] in one_by_one else None
        assert figures["graphs_kept"] + figures["prefixes_recomputed"] == 3, name
        assert kept in (None, figures["graphs_kept"]), name
        assert figures.get("bound_s", 0.0) <= serial["step_s"], name
        # no GPU's peak to compare with what is planned
        assert figures.get("peak_over_planned") is None, name
        assert ("planned_peak_gib" in figures) == (name != "serial-per-response"), name
    assert "bound_s" not in found["disaggregated"]
    assert found["disaggregated"]["push_bytes"] > 0
    assert serial["prefix_overlap_fraction"] == 0.0
    assert found["rollplex"]["prefix_overlap_fraction"] > 0.0
    assert (tmp_path / "steps.png").stat().st_size > 10_000
    assert (tmp_path / "kept" / "runs" / "fused" / "timeline.jsonl").is_file()
    assert (tmp_path / "kept" / "logs").is_dir()
