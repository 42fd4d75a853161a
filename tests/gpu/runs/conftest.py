"""Nodes whose services compute on GPUs, under MPS, and the model that their runs train."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from common.config.deployment import Deadlines
from common.vlm.initialise import initialise, load_spec
from tests.integration.runs.conftest import SPEC, VOCABULARY
from tests.integration.runs.lab import Lab
from tests.integration.runs.node import Node, deployment
from tests.integration.runs.recipes import recorded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.runs.lab import Finished


LONG = Deadlines(start_s=300.0)
"""Twice as many processes start at a time."""


@pytest.fixture
def gpu_lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A node of the test's own; its logs are printed if the test fails."""
    with _lab(request, "gpu") as lab:
        yield lab


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest) -> Iterator[Finished]:
    """What one rank has recorded. Its node has ended: the next one has the GPU to itself."""
    with _lab(request, "gpu") as lab:
        run = asyncio.run(recorded(lab))
        lab.node.stop()
        yield run


@pytest.fixture
def two_gpu_lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """As `gpu_lab`, with two ranks of each service that computes, on a GPU each."""
    with _lab(request, "gpus", train_tp=2, rollout_tp=2, deadlines=LONG) as lab:
        yield lab


@pytest.fixture
def two_replica_lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The same with two replicas of one rank, on a GPU each."""
    with _lab(request, "replicas", dp=2, deadlines=LONG) as lab:
        yield lab


@contextmanager
def _lab(request: pytest.FixtureRequest, name: str, **settings: Any) -> Iterator[Lab]:
    failed_before = request.session.testsfailed
    # Not pytest's folder: its long names make a Unix socket's path too long.
    with tempfile.TemporaryDirectory(prefix="rollplex-gpu-") as path:
        folder = Path(path)
        spec = load_spec(SPEC)
        tokenizer = spec.tokenizer.model_copy(update={"fill_to_tokens": VOCABULARY})
        initialise(spec.model_copy(update={"tokenizer": tokenizer}), folder / "model")
        made = deployment(folder / "node", name=name)
        node = Node(made.model_copy(update={"device": "cuda", **settings}), folder)
        try:
            node.start()
            yield Lab(node, folder / "model")
        except Exception:
            print(node.complaints())  # noqa: T201 - pytest shows it with the failure
            raise
        finally:
            node.stop()
            if request.session.testsfailed > failed_before:
                print(node.complaints())  # noqa: T201 - pytest shows it with the failure
