"""What fits, and step time by budget: two points of each, rehearsed on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.structure.source import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMALL_GIB, LARGE_GIB = 0.002, 0.02
"""Less than the weights of both roles and the gradients, and room for everything."""


def run(module: str, arguments: str, json_file: Path) -> dict[str, Any]:
    arguments += f" --scale tiny --device cpu --data-workers 1 --json {json_file}"
    command = [sys.executable, "-m", module, *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert json.loads(json_file.read_text()) == report
    return report


def test_what_fits_in_each_budget(tmp_path: Path) -> None:
    arguments = (
        f"--budgets {SMALL_GIB},{LARGE_GIB} --models 3b --questions prompts --governing resident "
        "--most 1 --estimate"
    )
    points = run("bench.fit", arguments, tmp_path / "fit.json")["points"]
    small, large = points.values()
    assert small["largest"] is None
    (refused,) = small["tries"]
    assert refused["outcome"] == "does not fit"
    assert "ArenaFull" in refused["reason"]
    assert large["largest"] == {"prompt_tokens": 64, "frames": 4, "prompts": 1}
    assert large["at_the_limit"]
    (fitted,) = large["tries"]
    assert (fitted["outcome"], fitted["graphs_kept"]) == ("fits", 1.0)
    assert SMALL_GIB < fitted["peak_gib"] <= LARGE_GIB
    assert all("planned_largest" in point for point in (small, large))


def test_every_schedule_has_a_time(tmp_path: Path) -> None:
    png = tmp_path / "budget.png"
    arguments = (
        f"--budgets {LARGE_GIB} --schedules serial,rollplex --steps 1 --warmup 1 --png {png}"
    )
    points = run("bench.budget", arguments, tmp_path / "budget.json")["points"]
    assert [point["schedule"] for point in points] == ["serial", "rollplex"]
    for point in points:
        assert (point["budget_gib"], point["outcome"]) == (LARGE_GIB, "fits")
        assert 0 < point["step_min_s"] == point["step_s"] == point["step_max_s"]
        assert point["graphs_kept"] == 3.0
        assert SMALL_GIB < point["peak_gib"] <= LARGE_GIB
    assert png.stat().st_size > 10_000
