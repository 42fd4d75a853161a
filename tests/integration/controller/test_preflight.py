"""What is checked before a run is accepted, in processes of its own."""

from __future__ import annotations

import os

import pytest

from common.config.loading import check
from common.config.recipe import Recipe
from common.errors import DeadlineExceeded, InvalidArgument
from common.vlm.initialise import ModelSpec, TokenizerSpec, initialise
from services.controller.preflight import PreflightBroken, check_recipe

pytestmark = pytest.mark.timeout(180)  # the first one waits until its imports are done


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    spec = ModelSpec(tokenizer=TokenizerSpec(texts=("a question",)))
    return initialise(spec, tmp_path_factory.mktemp("models") / "small").path


@pytest.fixture
def checked(model, tmp_path):
    async def run(code="return [{'messages': [{'role': 'user', 'content': 'hi'}]}] * 3", **given):
        source = tmp_path / "source.py"
        source.write_text(f"import os, time\n\ndef rows():\n    {code}\n")
        tree = {
            "name": "check",
            "model": {"path": str(model)},
            "data": {"train": f"{source}:rows"},
            "rollout": {"max_new_tokens": 1},
            "reward": {"functions": [{"function": "examples.digits.reward:exact_match"}]},
            "algorithm": {},
            "training": {"steps": 1, "prompts_per_step": 1},
        }
        recipe = check(Recipe, tree | given.pop("tables", {}), source="a test")
        file = tmp_path / "recipe.json"
        file.write_text(recipe.resolved_json())
        return await check_recipe(recipe, file, deadline_s=given.pop("deadline_s", 100))

    return run


async def test_a_good_recipe_has_facts(checked):
    facts = await checked()
    assert (facts.train_rows, facts.eval_rows, facts.warnings) == (3, 0, ())


async def test_problems_of_data_and_of_rewards_are_told_together(checked):
    tables = {
        "data": {"train": "no.such:rows"},
        "reward": {"functions": [{"function": "no.such:reward"}]},
    }
    with pytest.raises(InvalidArgument) as caught:
        await checked(tables=tables)
    assert "data.train = 'no.such:rows'" in str(caught.value)
    assert "reward.functions[0].function" in str(caught.value)


async def test_each_check_reads_the_code_as_it_is_now(checked):
    assert (await checked()).train_rows == 3
    row = "{'messages': [{'role': 'user', 'content': 'hi'}]}"
    assert (await checked(f"return [{row}] * 5")).train_rows == 5


async def test_code_that_ends_the_process_is_told_with_what_it_said(checked):
    with pytest.raises(PreflightBroken, match=r"status 7 and no report: last words"):
        await checked("os.write(2, b'last words'); os._exit(7)")


async def test_code_that_hangs_is_ended(checked, tmp_path):
    pid = tmp_path / "pid"
    code = f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    await checked()  # The process that others are forked from has imported everything.
    with pytest.raises(DeadlineExceeded, match="took over 3 s"):
        await checked(code, deadline_s=3)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
