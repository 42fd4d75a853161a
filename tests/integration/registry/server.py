"""A real Redis server for tests: started by path, stopped and killed by pid."""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING

from common.registry.embedded import EmbeddedServer, find_server, wait_ready

if TYPE_CHECKING:
    from pathlib import Path


class RedisServer:
    """Owns one server process on a Unix socket in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._server = EmbeddedServer(
            binary=find_server(), data_dir=folder, socket=folder / "redis.sock"
        )
        self._process: subprocess.Popen | None = None
        self.url = f"unix://{folder}/redis.sock"

    async def start(self) -> None:
        self._process = subprocess.Popen(  # noqa: ASYNC220 - stopped outside the loop too
            self._server.command, stdout=subprocess.DEVNULL
        )
        await wait_ready(self.url, timeout_s=20)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(20)
            self._process = None
