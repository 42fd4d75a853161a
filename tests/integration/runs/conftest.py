"""Nodes for the run tests, and the model that their runs train."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from common.config.deployment import Deadlines
from common.vlm.initialise import initialise, load_spec
from tests.integration.runs.lab import Lab
from tests.integration.runs.node import REPOSITORY, Node, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TIGHT_ROOM_BYTES = 1_700_000
SIDES = (((2, 1), (1, 2)), ((1, 2), (2, 1)))
WIDE_SIDES = (
    ((1, 1), (2, 1)),
    ((1, 1), (1, 2)),
    ((4, 1), (2, 2)),
    ((4, 1), (1, 4)),
    ((2, 2), (4, 1)),
    ((2, 2), (1, 4)),
)
"""Degree and replicas of training, and of the rollout."""
VOCABULARY = 368
"""Divided by any number of ranks here."""
SPEC = REPOSITORY / "rollplex" / "verify" / "model.toml"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    initialise(load_spec(SPEC), folder)
    return folder


@pytest.fixture(scope="session")
def divided_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that several ranks can split."""
    spec = load_spec(SPEC)
    tokenizer = spec.tokenizer.model_copy(update={"fill_to_tokens": VOCABULARY})
    folder = tmp_path_factory.mktemp("divided") / "tiny"
    initialise(spec.model_copy(update={"tokenizer": tokenizer}), folder)
    return folder


@pytest.fixture(scope="session")
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """The node of all tests that leave it as it was."""
    with running(request) as node:
        yield node


@pytest.fixture(scope="module")
def mortal_node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """A node of the module's own, whose processes it may kill."""
    with running(request) as node:
        yield node


@pytest.fixture(scope="module")
def governed_node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """A node of the module's own, whose background services take turns beside the decode."""
    with running(request, governor="on") as node:
        yield node


@pytest.fixture(scope="module")
def parallel_node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """A node of the module's own, with two ranks of each service that computes, taking turns."""
    deadlines = Deadlines(start_s=300.0)
    ranks = {"train_tp": 2, "rollout_tp": 2}
    with running(request, **ranks, governor="on", deadlines=deadlines) as node:
        yield node


def between(sides: tuple[tuple[int, int], tuple[int, int]]) -> str:
    """The name of a test's parameter."""
    return "to".join("x".join(map(str, side)) for side in sides)


@pytest.fixture(scope="module", params=SIDES, ids=between)
def unequal_node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """A node of the module's own, whose rollout has another degree and other replicas than
    training."""
    with _unequal(request) as node:
        yield node


@pytest.fixture(scope="module", params=WIDE_SIDES, ids=between)
def wide_node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """As `unequal_node`, of other numbers."""
    with _unequal(request) as node:
        yield node


@pytest.fixture(scope="module")
def replicated_node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """A node of the module's own, with two replicas of each service that computes, each of which
    takes turns."""
    with running(request, dp=2, governor="on", deadlines=Deadlines(start_s=300.0)) as node:
        yield node


@pytest.fixture(scope="module")
def free_replicated_node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """As `replicated_node`, without turns."""
    with running(request, dp=2, deadlines=Deadlines(start_s=300.0)) as node:
        yield node


@pytest.fixture(scope="module")
def replicated_parallel_node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """A node of the module's own, with two replicas of two ranks of each service that computes."""
    deadlines = Deadlines(start_s=400.0)
    settings = {"train_tp": 2, "rollout_tp": 2, "dp": 2, "deadlines": deadlines}
    with running(request, **settings) as node:
        yield node


@pytest.fixture(scope="module")
def tight_node(request: pytest.FixtureRequest, model: Path) -> Iterator[Node]:
    """A node of the module's own, with room for the leases of one group of `wordy_rows`, and little
    more: the policy's K/V of six of them do not fit.
    """
    arena_bytes = storage_bytes(model) + TIGHT_ROOM_BYTES
    with running(request, arena_gib=arena_bytes / 2**30) as node:
        yield node


@pytest.fixture(scope="module")
def faulty_node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """A node of the module's own, two of whose processes can be told to read a wrong bit."""
    with running(request, package="tests.integration.runs.faulty") as node:
        yield node


@pytest.fixture(scope="session")
def lab(node: Node, model: Path) -> Lab:
    return Lab(node, model)


@pytest.fixture(scope="session")
def alone(node: Node, divided_model: Path) -> Lab:
    """What several ranks do, done by one."""
    return Lab(node, divided_model)


@pytest.fixture(autouse=True)
def no_run_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that failed must not leave its run in the way of the next one's."""
    yield
    for name in (
        "node",
        "mortal_node",
        "governed_node",
        "parallel_node",
        "unequal_node",
        "wide_node",
        "replicated_node",
        "free_replicated_node",
        "replicated_parallel_node",
        "tight_node",
        "faulty_node",
    ):
        if name in request.fixturenames:
            asyncio.run(_stop_all(request.getfixturevalue(name)))


def storage_bytes(model: Path) -> int:
    """What a run of a float32 policy with a reference keeps for its whole life."""
    weights_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    # weights of both roles, which are the masters too, gradients, and two moments
    return 5 * weights_bytes


async def _stop_all(node: Node) -> None:
    async with node.client() as client:
        for run in await client.list_runs():
            if not run.state.ended:
                await client.stop(run.run_id)
                await client.wait_run(run.run_id)


@contextmanager
def _unequal(request: pytest.FixtureRequest) -> Iterator[Node]:
    (train_tp, dp), (rollout_tp, rollout_dp) = request.param
    sides = {"train_tp": train_tp, "dp": dp, "rollout_tp": rollout_tp, "rollout_dp": rollout_dp}
    with running(request, **sides, deadlines=Deadlines(start_s=400.0)) as node:
        yield node
