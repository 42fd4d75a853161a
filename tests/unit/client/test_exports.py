"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rollplex

PUBLIC = [
    "AlreadyExists",
    "Checkpoint",
    "Client",
    "Cluster",
    "ConsumerWeights",
    "DeadlineExceeded",
    "FailedPrecondition",
    "InvalidArgument",
    "Ledger",
    "LedgerArena",
    "LedgerEntry",
    "NotFound",
    "Recipe",
    "ResourceExhausted",
    "RollplexError",
    "Run",
    "RunState",
    "RunUpdate",
    "ServiceEntry",
    "ServicePhase",
    "Stale",
    "StepMode",
    "StepRecord",
    "Unavailable",
    "WeightsDifference",
    "WeightsReport",
    "load_recipe",
]


def test_the_public_names_are_these():
    assert sorted(rollplex.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(rollplex, name).__name__ == name


def test_the_client_has_these_methods():
    methods = [name for name in vars(rollplex.Client) if not name.startswith("_")]
    assert methods == [
        "connect",
        "close",
        "create_run",
        "get_run",
        "list_runs",
        "run_at_work",
        "watch_run",
        "wait_run",
        "pause",
        "resume",
        "stop",
        "save_checkpoint",
        "cluster",
        "ledger",
        "verify_weights",
    ]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Nothing"):
        getattr(rollplex, "Nothing")  # noqa: B009 - the type checker knows better


def _modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_control_plane_imports_without_torch():
    modules = _modules_after(
        "import rollplex; rollplex.Client; import rollplex.cli.__main__, rollplex.doctor, "
        "rollplex.cli.progress, rollplex.report.summary, services.controller.service"
    )
    assert "services.controller.actor" in modules
    assert not {"torch", "transformers", "matplotlib"} & modules


def test_the_command_starts_without_grpc_and_pydantic():
    modules = _modules_after("import rollplex.cli.__main__")
    assert not {"grpc", "pydantic", "redis", "numpy"} & modules
