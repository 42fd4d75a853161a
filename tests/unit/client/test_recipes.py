"""Reading recipes on the client's side."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import InvalidArgument
from rollplex import load_recipe

TEXT = """
name = "r"
model = {path = "models/m", reference_path = "/abs/ref"}
data = {train = "rows/train.jsonl", eval = "lib/rows.py:held_out"}
rollout = {max_new_tokens = 1}
reward = {functions = [{function = "pkg.mod:f"}, {function = "lib/r.py:g", weight = 2.0}]}
algorithm = {}
training = {steps = 1, prompts_per_step = 1, replay_from = "old"}
"""


@pytest.fixture
def recipe_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "recipe.toml"
    path.write_text(TEXT)
    return path


def test_files_become_absolute_and_modules_stay(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file, sets=["training.steps=7"])
    assert recipe.model.path == tmp_path / "models/m"
    assert recipe.model.reference_path == Path("/abs/ref")
    assert recipe.data.train == f"{tmp_path}/rows/train.jsonl"
    assert recipe.data.eval == f"{tmp_path}/lib/rows.py:held_out"
    functions = [function.function for function in recipe.reward.functions]
    assert functions == ["pkg.mod:f", f"{tmp_path}/lib/r.py:g"]
    assert recipe.training.replay_from == tmp_path / "old"
    assert recipe.training.steps == 7


def test_a_wrong_key_is_named_with_what_is_legal(recipe_file):
    with pytest.raises(InvalidArgument, match=r"training\.stepz: unknown key.*'steps'"):
        load_recipe(recipe_file, sets=["training.stepz=7"])
