from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.unit.structure.source import ROOT

if TYPE_CHECKING:
    from pathlib import Path

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
    "test-sglang",
    "bench",
    "up",
    "status",
    "logs",
    "down",
    "clean",
]

# Runs `python -c CODE` as if it were Python 3.10.
OLD_PYTHON = """#!/bin/sh
exec {python} -c '
import collections, sys
sys.version_info = collections.namedtuple("V", "major minor micro")(3, 10, 0)
exec(sys.argv[1])
' "$2"
"""


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


def test_an_older_python_is_refused_by_name(tmp_path: Path) -> None:
    old = tmp_path / "python3.10"
    old.write_text(OLD_PYTHON.format(python=sys.executable))
    old.chmod(0o755)
    done = make("setup", f"PYTHON={old}", f"VENV={tmp_path}/venv")
    assert done.returncode != 0
    assert "is 3.10; Rollplex needs 3.11 or newer" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_ci_runs_everything_that_has_to_pass() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert script.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in script
    assert re.search(r"^for target in setup lint type test; do$", script, re.MULTILINE)
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
