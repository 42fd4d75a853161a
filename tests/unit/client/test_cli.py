"""What the command says when something is wrong, and its exit codes."""

from __future__ import annotations

import json
import socket

import pytest

from rollplex.cli.__main__ import main

RECIPE = """
name = "r"
model = {path = "m"}
data = {train = "a.b:c"}
rollout = {max_new_tokens = 1}
reward = {functions = [{function = "a.b:c"}]}
algorithm = {}
training = {steps = 1, prompts_per_step = 1}
"""


@pytest.fixture
def nobody():
    """An address at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return str(path)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["training.stepz=3"], "training.stepz: unknown key"),
        (["training.steps=0"], "training.steps = 0: "),
        (["training.schedule=faster"], "training.schedule = 'faster': "),
        (["rollout.max_slots=2"], "max_slots = 2 cannot hold one group"),
        (["training.eval_prompts=5"], "data.eval is not"),
        (["steps"], "--set 'steps' is not of the form"),
    ],
)
def test_a_wrong_recipe_is_told_before_the_controller_is_asked(
    capsys, nobody, recipe, sets, message
):
    options = [part for item in sets for part in ("--set", item)]
    assert main(["--address", nobody, "run", recipe, *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.out == ""


def test_a_missing_recipe_file(capsys, nobody):
    assert main(["--address", nobody, "run", "/no/recipe.toml"]) == 2
    assert "error: configuration file /no/recipe.toml cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [["list"], ["status"], ["status", "r"], ["watch", "r"], ["pause", "r"], ["stop", "r"]],
)
def test_an_unreachable_controller(capsys, nobody, command):
    assert main(["--address", nobody, *command]) == 3
    captured = capsys.readouterr()
    assert f"error: no controller answers at {nobody}" in captured.err
    assert "python -m deploy.local status" in captured.err


def test_wrong_usage(capsys):
    assert main(["pause"]) == 2
    assert main(["no-such-command"]) == 2
    assert main(["--help"]) == 0


@pytest.mark.parametrize(
    "options", [["--step"], ["--step", "--png", "out.png", "--seconds", "3"], ["--step", "--watch"]]
)
def test_a_steps_memory_is_a_picture_as_long_as_the_step(capsys, nobody, options):
    assert main(["--address", nobody, "memory", *options]) == 2
    assert "--step wants --png and no --seconds" in capsys.readouterr().err


def test_doctor_as_json(capsys):
    code = main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    by_subject = {finding["subject"]: finding for finding in findings}
    assert by_subject["memfd"]["verdict"] == "ok"
    assert {"python", "torch", "GPU", "cores", "threads", "memory", "Redis", "ports"} <= set(
        by_subject
    )
    assert code == int(any(finding["verdict"] == "lacks" for finding in findings))


def test_doctor_names_a_lack_and_its_mend(capsys, monkeypatch, tmp_path):
    config = tmp_path / "d.toml"
    config.write_text('arena_gib = 1e6\nstate_dir = "/tmp"\n')
    monkeypatch.setenv("ROLLPLEX_CONFIG", str(config))
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "LACK  memory: " in text
    assert "set a smaller arena_gib" in text
