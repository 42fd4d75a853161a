"""A node of its own for a verification: free ports, a folder that goes away, every service."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import threading
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from common.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping
    from pathlib import Path


async def run_module(module: str, *arguments: str) -> str:
    """Run `python -m module` to its end and return what it printed.

    Raises: Unavailable with the end of its error output if it failed.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await process.communicate()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    if process.returncode != 0:
        text = (errors or out).decode(errors="replace")[-4000:]
        raise Unavailable(f"python -m {module} ended with {process.returncode}:\n{text}")
    return out.decode()


@asynccontextmanager
async def temporary_node(
    folder: Path,
    *,
    device: str = "cpu",
    arena_gib: float = 0.5,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> AsyncIterator[str]:
    """Start every service on free ports; stop all of them at the end, also on SIGTERM.

    Args:
        folder: for state and logs.
        settings: further keys of the deployment.
    Yields: the controller's address.
    """
    port = _free_port()
    deployment: dict[str, Any] = {
        "name": f"verify-{port}",
        "state_dir": str(folder),
        "grpc_port_base": 0,
        "http_port_base": 0,
        "services": {"controller": {"grpc_port": port}},
        "device": device,
        "arena_gib": arena_gib,
        **settings,
    }
    config = folder / "deployment.json"
    await asyncio.to_thread(_write, config, json.dumps(deployment))
    with _cancelled_by_sigterm():
        try:
            await run_module("deploy.local", "up", "--config", str(config))
            yield f"127.0.0.1:{port}"
        finally:
            await run_module("deploy.local", "down", "--config", str(config))


@contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    """The signal cancels the current task, in a process whose main thread runs the loop.

    Only the first one: `timeout` of coreutils sends two, and the second would end the clearing up.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    if task is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    cancel_once = cache(task.cancel)
    loop.add_signal_handler(signal.SIGTERM, cancel_once)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
