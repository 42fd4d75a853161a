"""A node whose services compute on the GPU, under MPS, and the model that its runs train."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from common.vlm.initialise import initialise, load_spec
from tests.integration.runs.conftest import SPEC
from tests.integration.runs.lab import Lab
from tests.integration.runs.node import Node, deployment

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def gpu_lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A node of the test's own; its logs are printed if the test fails."""
    failed_before = request.session.testsfailed
    # Not pytest's folder: its long names make a Unix socket's path too long.
    with tempfile.TemporaryDirectory(prefix="rollplex-gpu-") as name:
        folder = Path(name)
        initialise(load_spec(SPEC), folder / "model")
        settings = deployment(folder / "node", name="gpu").model_copy(update={"device": "cuda"})
        node = Node(settings, folder)
        try:
            node.start()
            yield Lab(node, folder / "model")
        finally:
            node.stop()
            if request.session.testsfailed > failed_before:
                print(node.complaints())  # noqa: T201 - pytest shows it with the failure
