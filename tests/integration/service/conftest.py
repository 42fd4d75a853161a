from __future__ import annotations

from tests.integration.registry.conftest import redis_server  # noqa: F401 - a fixture
