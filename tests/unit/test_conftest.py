from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"

LEAKING = """
import mmap, os, socket, subprocess
import pytest

KEPT = []

def test_socket():
    KEPT.append(socket.socket())

def test_file(tmp_path):
    KEPT.append(open(tmp_path / "file", "w"))

def test_mapping():
    fd = os.memfd_create("rollplex:test")
    os.truncate(fd, 4096)
    KEPT.append(mmap.mmap(fd, 4096))
    os.close(fd)

def test_process():
    KEPT.append(subprocess.Popen(["sleep", "5"]))

def test_clean(tmp_path):
    with socket.socket(), open(tmp_path / "file", "w"):
        pass
    garbage = socket.socket()
    garbage.close()

@pytest.fixture(scope="module")
def shared():
    with socket.socket() as kept:
        yield kept

def test_fixture_of_the_module_may_stay(shared):
    pass

def test_end():
    KEPT[-1].kill()
    KEPT[-1].wait()
"""

SKIPPING = """
import pytest

@pytest.mark.skip(reason="no device")
def test_device():
    pass
"""


def run(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    hooks = CONFTEST.read_text().replace("_GRACE_S = 3.0", "_GRACE_S = 0.1")
    (folder / "conftest.py").write_text(hooks)
    (folder / "test_inner.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_what_a_test_leaves_open_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, LEAKING)
    left = re.findall(r"^E +Failed: left open by this test: (.*)$", done.stdout, re.MULTILINE)
    assert [re.sub(r"process \d+", "process", line) for line in left] == [
        "socket: 1",
        "file: 1",
        "mapping of shared memory: 1, shared memory: 1",
        "process: 1",
    ]
    assert "7 passed, 4 errors" in done.stdout


def test_lane_that_skips_everything_has_failed(tmp_path: Path) -> None:
    assert run(tmp_path, SKIPPING).returncode == 0
    done = run(tmp_path, SKIPPING, "--require-run")
    assert done.returncode == 5
    assert "no test ran, and --require-run asks for one" in done.stdout


def test_lane_without_tests_has_failed(tmp_path: Path) -> None:
    assert run(tmp_path, "", "--require-run").returncode == 5
