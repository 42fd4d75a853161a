from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.integration.registry.server import RedisServer


@pytest.fixture
async def redis_server():
    # pytest's own temporary folders are too long for a Unix socket.
    with tempfile.TemporaryDirectory(prefix="rp-") as folder:
        server = RedisServer(Path(folder))
        await server.start()
        yield server
        server.stop()
