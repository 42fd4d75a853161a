"""Every configuration among the examples is complete and fits its task."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config.loading import load_config
from common.config.recipe import Recipe
from common.data.dataset import open_dataset
from common.data.processor import PromptLimits, PromptProcessor
from common.data.resolve import resolve_function
from common.vlm.initialise import initialise, load_spec

EXAMPLES = Path(__file__).parents[3] / "examples"
ANSWERS = {"digits": list("0123456789"), "minigrid": ["left", "right", "forward"]}


def test_no_configuration_is_left_out():
    assert {path.parent.name for path in EXAMPLES.glob("*/recipe.toml")} == set(ANSWERS)
    files = {path.name for path in EXAMPLES.rglob("*.toml")}
    assert files == {"recipe.toml", "model.toml"}


@pytest.mark.parametrize("example", ANSWERS)
def test_recipe_model_and_data_fit(example, tmp_path):
    recipe = load_config(Recipe, EXAMPLES / example / "recipe.toml")
    assert recipe.rollout.max_new_tokens == 1
    model = initialise(load_spec(EXAMPLES / example / "model.toml"), tmp_path / "m").path
    processor = PromptProcessor(
        model, PromptLimits(max_prompt_tokens=recipe.data.max_prompt_tokens)
    )
    for answer in ANSWERS[example]:
        assert len(processor.tokenizer.encode(answer, add_special_tokens=False)) == 1
    rows = open_dataset(recipe.data.train, key="data.train")
    held_out = open_dataset(recipe.data.eval, key="data.eval")
    assert recipe.training.eval_prompts <= len(held_out)
    for dataset in (rows, held_out):
        prepared = processor.prepare(dataset[0], sample="s")
        assert prepared.prompt().vision_tokens > 0
    for function in recipe.reward.functions:
        value = resolve_function(function.function, key="reward.functions")("nonsense", rows[0])
        assert value == 0.0
