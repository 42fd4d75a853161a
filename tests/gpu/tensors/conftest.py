"""A broker with GPU memory, and participants with torch in processes of their own."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import torch

from common.gpu.driver import memory_info
from tests.integration.broker.conftest import (
    REPOSITORY,
    Broker,
    Started,
    connected,
    start_broker,
    stop,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from common.ids import Participant

MIB = 1 << 20
BUDGET_GIB = 4
SLACK_BYTES = 96 * MIB
"""What contexts and caches of other processes may move by while a test looks."""
ANSWER_S = 120.0
"""Longest answer of a participant; importing torch and opening CUDA is in the first one."""
BACK_S = 40.0
"""Until a killed process has given its device memory back."""


class Remote:
    """A participant process that does what it is told."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def order(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{json.dumps({'do': do, **arguments})}\n".encode())
        async with asyncio.timeout(ANSWER_S):
            line = await self.process.stdout.readline()
        assert line, f"{do} ended the participant"
        return json.loads(line)

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def remote(broker: Broker, participant: Participant) -> AsyncIterator[Remote]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.gpu.tensors.participant",
        str(broker.deployment.broker_socket),
        str(participant),
        cwd=REPOSITORY,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        remote = Remote(process)
        await remote.order("ready")
        yield remote
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def free_bytes() -> int:
    """Free memory of the first GPU, whoever uses the rest; this process caches none."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return memory_info(0)[0]


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for the driver, which gives memory back after the process is gone."""
    try:
        async with asyncio.timeout(BACK_S):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"not within {BACK_S:g} s: {what}; {free_bytes() / MIB:.0f} MiB are free")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """One process for the tests of a module."""
    folder = tmp_path_factory.mktemp("broker")
    started = start_broker(folder, device="cuda", hbm_budget_gib=BUDGET_GIB)
    yield started
    assert stop(started.process) == 0, started.log


@pytest_asyncio.fixture
async def mortal_broker(tmp_path: Path) -> AsyncIterator[Broker]:
    """A broker of the test's own, which it may kill."""
    started = start_broker(tmp_path, device="cuda", hbm_budget_gib=BUDGET_GIB)
    try:
        async with connected(started) as broker:
            yield broker
    finally:
        stop(started.process)


@pytest_asyncio.fixture
async def broker(started: Started) -> AsyncIterator[Broker]:
    """A fresh run on the module's broker."""
    async with connected(started) as broker:
        yield broker
