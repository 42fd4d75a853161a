from __future__ import annotations

import subprocess
import sys

import pytest

from tests.unit.structure.source import (
    PACKAGES,
    ROOT,
    dotted,
    files,
    imports,
    is_generated,
    modules,
    name_of,
)

ALLOWED = {
    "protos": {"protos"},
    "common": {"protos", "common"},
    "services": {"protos", "common"},
    "rollplex": {"protos", "common", "rollplex"},
    "deploy": {"protos", "common", "deploy"},
    "examples": {"protos", "common", "rollplex", "deploy", "examples"},
    "bench": set(PACKAGES),
}
"""What modules of a folder may import of this project; a service also imports itself."""

TORCH_FREE = (
    "common.actor",
    "common.bus",
    "common.config",
    "common.data.order",
    "common.errors",
    "common.events",
    "common.ids",
    "common.layouts",
    "common.registry",
    "common.rl.config",
    "common.rl.reward_config",
    "common.service",
    "common.step",
    "common.tensors.client",
    "common.transport",
    "common.vlm.files",
    "common.vlm.names",
    "common.vlm.parallel.shards",
    "common.vlm.shape",
    "common.weights.layout",
    "deploy.containers",
    "deploy.local",
    "rollplex",
    "services.broker",
    "services.controller",
    "services.rollout.rewards.worker",
)
"""Modules, and packages with all that is in them, that import without torch."""

PROBE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"importing {name} imports torch")
"""


def _allowed(module: str) -> set[str]:
    top, _, rest = module.partition(".")
    own = {f"services.{rest.partition('.')[0]}"} if top == "services" else set()
    return ALLOWED[top] | own


def _is_ours(imported: str) -> bool:
    return imported.partition(".")[0] in (*PACKAGES, "tests")


def _offences(module: str, imported: set[str]) -> list[str]:
    allowed = _allowed(module)
    return [
        name
        for name in sorted(filter(_is_ours, imported))
        if not any(name == root or name.startswith(f"{root}.") for root in allowed)
    ]


def test_imports_go_one_way() -> None:
    offences = [
        f"{name_of(path)} imports {name}"
        for path in modules()
        if path.relative_to(ROOT).parts[0] in PACKAGES
        for name in _offences(dotted(path), imports(path))
    ]
    assert offences == []


def test_compiled_protos_import_nothing_else_of_the_project() -> None:
    offences = [
        f"{name_of(path)} imports {name}"
        for path in files()
        if is_generated(path) and path.suffix == ".py"
        for name in _offences("protos", imports(path))
    ]
    assert offences == []


@pytest.mark.parametrize(
    ("module", "imported", "is_offence"),
    [
        ("common.bus.hub", "services.broker.state", True),
        ("common.bus.hub", "common.events", False),
        ("services.rollout.step", "services.rollout.run", False),
        ("services.rollout.step", "services.learner.run", True),
        ("services.rollout.step", "services.rollouts", True),
        ("services.rollout.step", "rollplex.client", True),
        ("rollplex.client", "services.controller.state", True),
        ("protos", "common.ids", True),
        ("common.ids", "tests.unit.bus.events", True),
        ("common.ids", "commonplace", False),
    ],
)
def test_the_rule_itself(module: str, imported: str, is_offence: bool) -> None:
    assert bool(_offences(module, {imported})) is is_offence


def test_control_plane_imports_without_torch() -> None:
    names = [
        name
        for name in map(dotted, modules())
        if any(name == root or name.startswith(f"{root}.") for root in TORCH_FREE)
    ]
    missing = [
        root
        for root in TORCH_FREE
        if not any(name == root or name.startswith(f"{root}.") for name in names)
    ]
    assert missing == [], "TORCH_FREE names modules that are gone"
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *names], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
