"""The check before a run: what it prints, and its exit status."""

from __future__ import annotations

import json

import pytest

from common.data.preflight import main


@pytest.fixture
def preflight(model_folder, tmp_path, capsys):
    def run(**data):
        recipe = {
            "name": "check",
            "model": {"path": str(data.pop("model", model_folder))},
            "data": {"train": "examples.digits.data:train"} | data,
            "rollout": {"max_new_tokens": 1},
            "reward": {"functions": [{"function": "examples.digits.reward:exact_match"}]},
            "algorithm": {},
            "training": {"steps": 1, "prompts_per_step": 1},
        }
        file = tmp_path / "recipe.json"
        file.write_text(json.dumps(recipe))
        status = main(["--recipe", str(file)])
        report = json.loads(capsys.readouterr().out)
        assert (status == 0) == report["ok"]
        return report

    return run


def test_a_good_recipe(preflight):
    report = preflight(eval="examples.digits.data:held_out")
    assert report == {
        "ok": True,
        "errors": [],
        "warnings": [],
        "rows": {"train": 1437, "eval": 360},
    }


def test_every_wrong_value_is_told(preflight, tmp_path):
    noisy = tmp_path / "noisy.py"
    noisy.write_text("print('{\"ok\": true}')\ndef rows():\n    return [{'messages': []}] * 2\n")
    report = preflight(train=f"{noisy}:rows", eval="no.such:rows")
    assert not report["ok"]
    assert {error["key"] for error in report["errors"]} == {"data.train", "data.eval"}
    assert "'messages' must be" in report["errors"][0]["message"]
    assert report["errors"][-1]["value"] == "no.such:rows"
    assert report["rows"] == {"train": 2}


def test_single_bad_rows_only_warn(preflight, tmp_path):
    mixed = tmp_path / "mixed.jsonl"
    good = {"messages": [{"role": "user", "content": "hello"}]}
    mixed.write_text(json.dumps({"messages": 3}) + "\n" + json.dumps(good) + "\n")
    report = preflight(train=str(mixed))
    assert report["ok"]
    assert len(report["warnings"]) == 1
    assert "train[0]" in report["warnings"][0]["message"]


def test_a_model_that_is_not_there(preflight):
    report = preflight(model="/no/such/model")
    assert [error["key"] for error in report["errors"]] == ["model.path"]
    assert "/no/such/model" in report["errors"][0]["message"]
