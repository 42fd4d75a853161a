"""`rollplex plan`: what it prints, as text and as JSON, and its exit codes."""

from __future__ import annotations

import json

import pytest

from rollplex.cli.__main__ import main
from rollplex.plan.plan import NAIVE, ROLLOUT_APART
from rollplex.plan.request import MOST_GROUPS
from rollplex.plan.table import Phase, TensorClass

EXAMPLE = ["plan", "--model", "qwen2.5-vl-32b", "--gpus", "32", "--gpu", "h800"]
PLANS = [NAIVE, "serial", "disaggregated", "rollplex", "fused", ROLLOUT_APART]
PLAN_KEYS = {
    "name",
    "fits",
    "peak_bytes",
    "peak_phase",
    "host_bytes",
    "prefix_graphs",
    "layer_inputs_only",
    "recipe",
    "notes",
    "classes",
    "totals",
    "excess",
}


def printed(capsys, *arguments):
    code = main([*EXAMPLE, *arguments])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, captured.out


def test_json(capsys):
    code, text = printed(capsys, "--json")
    document = json.loads(text)
    assert code == 0
    assert set(document) == {
        "model",
        "gpu",
        "parallel",
        "batch",
        "switches",
        "saved_bytes_a_token",
        "assumptions",
        "plans",
    }
    assert document["parallel"]["train_tp"] == 8
    assert document["parallel"]["rollout_tp"] == 4
    assert document["assumptions"]
    assert [plan["name"] for plan in document["plans"]] == PLANS
    phases = [phase.value for phase in Phase]
    for plan in document["plans"]:
        assert set(plan) == PLAN_KEYS
        assert list(plan["totals"]) == phases
        for row in plan["classes"]:
            assert set(row) == {"name", "why", "bytes"}
            assert row["name"] in list(TensorClass)
            assert row["why"]
            assert list(row["bytes"]) == phases
        for phase in phases:
            rows = [row["bytes"][phase] for row in plan["classes"]]
            assert all(isinstance(size, int) and size >= 0 for size in rows)
            assert plan["totals"][phase] == sum(rows)
        assert plan["peak_bytes"] == max(plan["totals"].values())
        budget = document["gpu"]["budget_bytes"]
        over = {phase: total - budget for phase, total in plan["totals"].items() if total > budget}
        assert {one["phase"]: one["bytes"] for one in plan["excess"]} == over
        assert plan["fits"] is not bool(over)


def test_text(capsys):
    code, text = printed(capsys, "--why")
    assert code == 0
    assert "naive: 162.5 of 79.6 GiB, DOES NOT FIT" in text
    assert text.count("GiB, fits") == len(PLANS) - 1
    assert "over in vision, prefill, window" in text
    assert "--set training.schedule=rollplex --set training.prefix_graphs=4" in text
    assert "parameters of a rank of TP 4 x 2 bytes" in text
    assert "sequence parallel" in text


def test_formulas_are_shown_when_asked_for(capsys):
    _, text = printed(capsys)
    assert "parameters of a rank" not in text


def test_nothing_fits(capsys):
    code, text = printed(capsys, "--train-tp", "1", "--rollout-tp", "1")
    assert code == 1
    assert text.count("DOES NOT FIT") == len(PLANS) - 1
    assert f"{ROLLOUT_APART}: 74" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt"], "model = 'gpt': neither a folder"),
        (["--gpu", "tpu"], "gpu = 'tpu': legal are"),
        (["--train-tp", "5"], "train_tp = 5: qwen2.5-vl-32b has 40 heads"),
        (["--prompts", "1" + 30 * "0"], f"prompts = 1{30 * '0'}: must be at most"),
        (["--headroom", "nan"], "headroom = nan: must be a number"),
        (["--headroom", "inf"], "headroom = inf: must be a number"),
        (["--headroom", "1e300"], "headroom = 1e+300: must be a number"),
        (["--headroom=-1"], "headroom = -1073741824 bytes: must be from 0"),
    ],
)
def test_wrong_input(capsys, arguments, message):
    assert main([*EXAMPLE, *arguments]) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_very_many_gpus_and_prompts(capsys):
    code, text = printed(capsys, "--gpus", "800000000", "--prompts", str(MOST_GROUPS), "--json")
    document = json.loads(text)
    assert code == 0
    assert document["parallel"]["train_tp"] == 8
