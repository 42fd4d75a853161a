"""Nodes whose rollout has an interpreter with SGLang, and its processes."""

from __future__ import annotations

import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from common.config.deployment import Deadlines
from tests.integration.runs.node import Node, deployment

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

START_S = 300.0
"""A node's start beside another engine, on two busy cores."""


@contextmanager
def node_with_sglang(
    request: pytest.FixtureRequest,
    engine_python: Path,
    *,
    start_s: float = START_S,
    **settings: Any,
) -> Iterator[Node]:
    """Args: settings: of the deployment."""
    # Not pytest's folder: its long names make a Unix socket's path too long.
    with tempfile.TemporaryDirectory(prefix="rollplex-sglang-") as name:
        folder = Path(name)
        made = deployment(
            folder / "node",
            name="sglang",
            engine_python=engine_python,
            deadlines=Deadlines(start_s=start_s),
            **settings,
        )
        node = Node(made, folder)
        failed_before = request.session.testsfailed
        try:
            node.start()
            yield node
        finally:
            node.stop()
            if request.session.testsfailed > failed_before:
                sys.stdout.write(node.complaints())


def scheduler(ancestor: int, *, rank: int) -> int:
    """Pid of SGLang's process of a rank, below a process."""
    (found,) = [
        child.pid
        for child in psutil.Process(ancestor).children(recursive=True)
        if child.cmdline()[:1] == [f"sglang::scheduler_TP{rank}"]
    ]
    return found
