"""A node for one verification or benchmark is gone when its process has ended."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(240)]

REPOSITORY = Path(__file__).parents[3]
HOLDS_A_NODE = """
import asyncio, pathlib, sys
from rollplex.verify.node import temporary_node

async def main():
    async with temporary_node(pathlib.Path(sys.argv[1])):
        print("up", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def processes_of(folder: Path) -> list[psutil.Process]:
    return [
        each
        for each in psutil.process_iter(["cmdline"])
        if any(str(folder) in argument for argument in each.info["cmdline"] or ())
    ]


@pytest.mark.parametrize("pause_s", [None, 0.0, 0.3], ids=["once", "twice", "twice-later"])
async def test_a_terminated_process_leaves_no_service(
    tmp_path: Path, pause_s: float | None
) -> None:
    folder = tmp_path / "node"
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLDS_A_NODE, str(folder)),
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
    )
    assert holder.stdout is not None
    try:
        assert await holder.stdout.readline() == b"up\n"
        assert len(processes_of(folder)) > 1
        holder.send_signal(signal.SIGTERM)
        if pause_s is not None:
            await asyncio.sleep(pause_s)
            holder.send_signal(signal.SIGTERM)
        assert await holder.wait() != 0
        assert not processes_of(folder)
    finally:
        if holder.returncode is None:
            holder.kill()
