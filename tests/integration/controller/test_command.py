"""The `rollplex` command against a real controller: from a recipe file to the report."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from common.vlm.initialise import ModelSpec, TokenizerSpec, initialise
from rollplex import InvalidArgument, load_recipe
from tests.integration.controller.conftest import recipe

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    spec = ModelSpec(tokenizer=TokenizerSpec(texts=("a question",)))
    return initialise(spec, tmp_path_factory.mktemp("models") / "small").path


async def _rollplex(controller, *arguments) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rollplex.cli",
        "--address",
        controller.address,
        *(str(argument) for argument in arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(100):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, out.decode(), err.decode()


async def test_from_a_recipe_to_the_report(controller, node, model_folder, tmp_path):
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe() | {"model": {"path": str(model_folder)}}))
    controller.start()
    client = await controller.client()
    out = tmp_path / "out"
    code, printed, err = await _rollplex(controller, "run", path, "--out", out, "--json")
    assert code == 0, err
    summary = json.loads(printed)
    assert (summary["state"], summary["steps"]) == ("succeeded", 3)
    assert len(summary["step_times_s"]) == 3
    assert json.loads((out / "summary.json").read_text()) == summary
    for name in ("recipe.json", "steps.jsonl", "timeline.jsonl", "learning_curve.png"):
        assert (out / name).stat().st_size > 0, name

    # The resolved recipe is a recipe again; a used folder is refused; a request counts once.
    again = load_recipe(out / "recipe.json")
    with pytest.raises(InvalidArgument, match="holds another run"):
        await client.create_run(again, run_dir=out)
    node.hold = {0}
    first = await client.create_run(again, request_id="once")
    second = await client.create_run(again, request_id="once")
    assert first.run_id == second.run_id
    assert len(await client.list_runs()) == 2
    await client.stop(first.run_id)
    await client.wait_run(first.run_id)
    await client.close()

    code, printed, _ = await _rollplex(controller, "list")
    assert code == 0
    assert summary["run_id"] in printed
    code, printed, _ = await _rollplex(controller, "watch", first.run_id)
    assert code == 1
    assert "stopped by a client" in printed
    code, _, err = await _rollplex(controller, "status", "nothing")
    assert code == 2
    assert "there is no run nothing" in err


async def test_data_and_rewards_that_cannot_be_used_are_all_named(
    controller, node, model_folder, tmp_path
):
    path = tmp_path / "recipe.json"
    wrong = recipe() | {
        "model": {"path": str(model_folder)},
        "data": {"train": "no.such:rows", "eval": "examples.digits.data:held_out"},
        "reward": {"functions": [{"function": "examples.digits.reward:no_such"}]},
    }
    path.write_text(json.dumps(wrong))
    controller.start()
    await (await controller.client()).close()
    code, out, err = await _rollplex(controller, "run", path)
    assert (code, out) == (2, "")
    assert "recipe tiny cannot run" in err
    assert "data.train = 'no.such:rows'" in err
    assert "reward.functions[0].function" in err
    assert "no_such" in err
