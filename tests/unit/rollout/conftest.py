"""A real broker for what the rollout keeps in its memory."""

from __future__ import annotations

from tests.integration.broker.conftest import broker, started

__all__ = ["broker", "started"]
