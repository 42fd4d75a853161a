"""The fixtures of the run tests."""

from __future__ import annotations

from tests.integration.runs.conftest import (
    alone,
    divided_model,
    free_replicated_node,
    model,
    mortal_node,
    no_run_is_left,
    node,
    replicated_node,
    replicated_parallel_node,
    wide_node,
)

__all__ = [
    "alone",
    "divided_model",
    "free_replicated_node",
    "model",
    "mortal_node",
    "no_run_is_left",
    "node",
    "replicated_node",
    "replicated_parallel_node",
    "wide_node",
]
