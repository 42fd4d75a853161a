"""The measurement of co-run rates, rehearsed on a CPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from bench.corun import ROWS
from tests.unit.structure.source import ROOT

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ("prefix", "prefix+backward")
WHOLE = "0"
"""The only share where there are none."""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_number_of_rows_has_rates_beside_every_pass(tmp_path: Path) -> None:
    path = tmp_path / "corun.json"
    arguments = f"--shape tiny --device cpu --seconds 0.1 --json {path}"
    command = [sys.executable, "-m", "bench.corun", *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["errors"] == {}
    assert "torch" in found["facts"]
    results = found["results"]
    beside = {f"{rows} rows {kind} {WHOLE}" for rows in ROWS for kind in KINDS}
    decodes = {f"{rows} rows alone" for rows in ROWS}
    passes = {f"alone {kind}" for kind in KINDS}
    assert set(results) == beside | decodes | passes

    for name in decodes:
        assert results[name].keys() == {"ms"}, name
        assert 0 < results[name]["ms"] < math.inf, name
    for name in passes:
        assert results[name].keys() == {"ms", WHOLE}, name
        assert 0 < results[name]["ms"] < math.inf, name
        assert results[name][WHOLE] == 1.0, name
    for name in beside:
        figures = results[name]
        assert figures.keys() == {"d", "p", "gain", "per_background", "per_decode"}, name
        d, p, gain = figures["d"], figures["p"], figures["gain"]
        assert 0 < d < math.inf, name
        assert 0 < p < math.inf, name
        assert gain == d + p, name
        assert figures["per_background"] == pytest.approx((gain - 1) / p), name
        assert figures["per_decode"] == pytest.approx((gain - 1) / d), name
        # the table that people read has it too
        line = next(line for line in done.stdout.splitlines()[::-1] if line.startswith(name))
        assert f"gain={gain:.4g}" in line, name
