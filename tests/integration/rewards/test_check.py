from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
MODULE = "tests.integration.rewards.functions_for_tests"


def check(tmp_path, *functions):
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"reward": {"functions": [{"function": f} for f in functions]}}))
    done = subprocess.run(
        [sys.executable, "-m", "services.rollout.rewards.check", "--recipe", str(recipe)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


def test_good_functions_pass(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("print('noise')\ndef reward(completion, row): return 1.0\n")
    assert check(tmp_path, f"{MODULE}:length", f"{path}:reward") == (0, {"ok": True, "errors": []})


def test_a_bad_function_is_named_by_key_and_value(tmp_path):
    status, answer = check(tmp_path, f"{MODULE}:length", "missing.module:reward")
    assert status == 1
    (error,) = answer["errors"]
    assert error["key"] == "reward.functions[1].function"
    assert error["value"] == "missing.module:reward"
    assert "is not on the import path" in error["message"]


def test_worker_and_check_import_without_torch():
    code = (
        "import sys, services.rollout.rewards.worker, services.rollout.rewards.check;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0
