"""Training hands weights over to ranks of the rollout, a process each, on one GPU by CUDA IPC.

The benchmark compares all weights that came by plan with those of the full copy, bit for bit.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from common.layouts.kinds import LayoutName
from common.vlm.tiny import tiny_config
from tests.unit.structure.source import ROOT

LIMIT_S = 120.0
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(LIMIT_S + 30)]


@pytest.mark.parametrize("train_layout", [LayoutName.NATIVE, LayoutName.MEGATRON])
def test_ranks_on_one_gpu_have_what_a_full_copy_brings(tmp_path, train_layout):
    (tmp_path / "config.json").write_text(tiny_config().to_json_string())
    arguments = f"--model {tmp_path} --train-layout {train_layout} --device cuda --processes 2"
    done = subprocess.run(
        [sys.executable, "-m", "bench.weights", *arguments.split(), "--bucket-mib", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    found = {
        (one["train_tp"], one["rollout_tp"]): (one["by_plan"], one["full_copy"])
        for one in json.loads(done.stdout)["handover"]
    }
    assert found.keys() == {(1, 1), (1, 2), (2, 2), (2, 1)}
    for degrees, (plan, full) in found.items():
        moved = plan["gather_bytes"] + plan["rebuild_bytes"]
        assert plan["alias_bytes"] > 0
        assert moved + plan["alias_bytes"] == full["rebuild_bytes"]
        if train_layout is LayoutName.NATIVE and degrees[0] == degrees[1]:
            assert moved == 0
    if train_layout is LayoutName.MEGATRON:
        assert found[1, 1][0]["rebuild_bytes"] > 0
