"""The fixtures of the run tests."""

from __future__ import annotations

from tests.integration.runs.conftest import model, mortal_node, no_run_is_left

__all__ = ["model", "mortal_node", "no_run_is_left"]
