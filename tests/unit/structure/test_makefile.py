from __future__ import annotations

import re
import subprocess

import pytest

from tests.unit.structure.source import ROOT

TARGETS = [
    "help",
    "setup",
    "protos",
    "protos-check",
    "demo",
    "fmt",
    "lint",
    "type",
    "test",
    "test-gpu",
    "test-nightly",
    "bench",
    "up",
    "status",
    "logs",
    "down",
    "clean",
]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_help_is_the_default_and_names_every_target() -> None:
    listed = re.findall(r"^  (\S+)  +\S", make().stdout, re.MULTILINE)
    assert listed == TARGETS


@pytest.mark.parametrize("target", ["local", "k8s"])
@pytest.mark.parametrize("name", TARGETS)
def test_every_target_has_a_recipe(name: str, target: str) -> None:
    done = make("--dry-run", name, f"TARGET={target}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_unknown_deployment_target_is_refused() -> None:
    done = make("--dry-run", "up", "TARGET=moon")
    assert done.returncode != 0
    assert "TARGET=moon: legal are local and k8s" in done.stderr


def test_an_older_python_is_refused_by_name(tmp_path: object) -> None:
    old = f"{tmp_path}/python3.10"
    script = "#!/bin/sh\necho 'from sys import exit'; exit 7\n"
    with open(old, "w") as file:
        file.write(script)
    subprocess.run(["chmod", "+x", old], check=True)
    done = make("setup", f"PYTHON={old}", f"VENV={tmp_path}/venv")
    assert done.returncode != 0


def test_ci_runs_everything_that_has_to_pass() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert script.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in script
    assert re.search(r"^for target in setup lint type test; do$", script, re.MULTILINE)
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
