"""For every test: nothing is left open, and a lane that ran no test has failed."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import re
import time
from collections import Counter
from typing import TYPE_CHECKING

import grpc
import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_GRACE_S = 3.0
"""What ends in the background, such as the last thread of a pool, may take this long."""

_KINDS = {
    "socket": re.compile(r"socket:"),
    "shared memory": re.compile(r"/memfd:|/dev/shm/"),
    "file": re.compile(r"/(?!dev/|proc/|sys/|memfd:)"),
}
# One for each interpreter that has started a process; it ends with the interpreter.
_ALLOWED_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--require-run` and `--sglang-python`."""
    parser.addoption(
        "--require-run", action="store_true", help="fail if no test ran, skipped ones not counted"
    )
    parser.addoption(
        "--sglang-python",
        default=".venv-sglang/bin/python",
        help="interpreter of the environment that has SGLang, for the tests marked sglang",
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Turn a session that ran nothing into a failure, if that was asked for."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not session.config.getoption("--require-run"):
        return
    if not any(reporter.stats.get(outcome) for outcome in ("passed", "failed", "error")):
        reporter.write_line("")
        reporter.write_line("no test ran, and --require-run asks for one", red=True)
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.fixture(scope="session", autouse=True)
def grpc_poller() -> None:
    """gRPC opens a socket pair once a process and keeps it: have it before the first test."""

    async def start() -> None:
        grpc.aio.init_grpc_aio()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(start())
    loop.close()


@pytest.fixture(scope="session")
def drawing_fonts() -> None:
    """matplotlib keeps the font files of its first drawing open: that is no leak of a test's."""
    from matplotlib.figure import Figure

    figure = Figure()
    figure.add_subplot().set_title("text")
    figure.savefig(io.BytesIO(), format="png")


@pytest.fixture(autouse=True)
def nothing_is_left_open(grpc_poller: None) -> Iterator[None]:
    """Fail a test after which more is open than before it."""
    before = _held()
    yield
    deadline_s = time.monotonic() + _GRACE_S
    while left := _held() - before:
        if time.monotonic() > deadline_s:
            pytest.fail(f"left open by this test: {_describe(left)}")
        gc.collect()
        time.sleep(0.02)


def _held() -> Counter[str]:
    """What this process holds: descriptors and mappings by kind, children by id."""
    held: Counter[str] = Counter()
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue
        held.update(kind for kind, pattern in _KINDS.items() if pattern.match(target))
    with open("/proc/self/maps") as maps:
        held["mapping of shared memory"] = sum("/memfd:rollplex" in line for line in maps)
    for child in psutil.Process().children():
        try:
            command = " ".join(child.cmdline())
            if not any(allowed in command for allowed in _ALLOWED_CHILDREN):
                held[f"process {child.pid}"] += 1
        except psutil.NoSuchProcess:
            continue
    return held


def _describe(left: Counter[str]) -> str:
    return ", ".join(f"{kind}: {number}" for kind, number in sorted(left.items()))
