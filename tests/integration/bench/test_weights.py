"""Updates of weights, measured on a CPU with a small model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from common.vlm.tiny import tiny_config
from tests.unit.structure.source import ROOT


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_both_ways_are_measured_on_equal_weights(tmp_path) -> None:
    (tmp_path / "config.json").write_text(tiny_config().to_json_string())
    arguments = f"--model {tmp_path} --train-layout megatron --bucket-mib 1 --repeats 1"
    command = [sys.executable, "-m", "bench.weights", *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    degrees = [(one["ranks"], one["train_tp"], one["rollout_tp"]) for one in found["ranks"]]
    assert degrees == [
        (2, 1, 2),
        (2, 2, 2),
        (2, 2, 1),
        (4, 1, 4),
        (4, 2, 4),
        (4, 4, 4),
        (4, 4, 1),
    ]
    for one in found["ranks"]:
        plan, full = one["by_plan"], one["full_copy"]
        moved = plan["gather_bytes"] + plan["rebuild_bytes"]
        assert full["alias_bytes"] == full["gather_bytes"] == 0
        assert moved + plan["alias_bytes"] == full["rebuild_bytes"]
        assert plan["alias_bytes"] > 0
        assert plan["extra_bytes"] < full["extra_bytes"]
        if one["train_tp"] == 1:
            assert full["collectives"] == 0
        if one["train_tp"] > one["rollout_tp"]:
            assert full["collectives"] >= plan["collectives"] > 0
    assert [(one["train_tp"], one["rollout_tp"]) for one in found["handover"]] == [
        (1, 1),
        *(pair[1:] for pair in degrees),
    ]
    for one in found["handover"]:
        plan, full = one["by_plan"], one["full_copy"]
        moved = plan["gather_bytes"] + plan["rebuild_bytes"]
        assert moved + plan["alias_bytes"] == full["rebuild_bytes"]
        assert plan["extra_bytes"] < full["extra_bytes"]
    assert found["handover"][0]["by_plan"]["rebuild_bytes"] > 0
