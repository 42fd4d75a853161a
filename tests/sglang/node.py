"""Nodes whose rollout has an interpreter with SGLang, and its processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil

from common.config.deployment import Deadlines
from tests.integration.runs.node import running

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    import pytest

    from tests.integration.runs.node import Node

START_S = 300.0
"""A node's start beside another engine, on two busy cores."""


def node_with_sglang(
    request: pytest.FixtureRequest,
    engine_python: Path,
    *,
    start_s: float = START_S,
    **settings: Any,
) -> AbstractContextManager[Node]:
    """Args: settings: of the deployment."""
    deadlines = Deadlines(start_s=start_s)
    return running(
        request, name="sglang", engine_python=engine_python, deadlines=deadlines, **settings
    )


def scheduler(ancestor: int, *, rank: int) -> int:
    """Pid of SGLang's process of a rank, below a process."""
    (found,) = [
        child.pid
        for child in psutil.Process(ancestor).children(recursive=True)
        if child.cmdline()[:1] == [f"sglang::scheduler_TP{rank}"]
    ]
    return found
