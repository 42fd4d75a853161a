"""The repository's own files, as the structure tests read them."""

from __future__ import annotations

import ast
import os
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("protos", "common", "services", "rollplex", "deploy", "examples", "bench")
"""Folders that are installed."""

_NOT_OURS = {"build", "dist", "runs", "__pycache__"}


@cache
def files() -> tuple[Path, ...]:
    """Every file of the repository but what tools, builds and runs leave there."""
    found: list[Path] = []
    for folder, folders, names in os.walk(ROOT):
        at_root = Path(folder) == ROOT
        folders[:] = sorted(
            name
            for name in folders
            if name not in _NOT_OURS
            and not name.endswith(".egg-info")
            and (not name.startswith(".") or (at_root and name == ".ci"))
        )
        found += [Path(folder, name) for name in sorted(names)]
    return tuple(found)


def is_generated(path: Path) -> bool:
    """Whether the protocol compiler wrote it."""
    return "_pb2" in path.name


@cache
def modules() -> tuple[Path, ...]:
    """Every Python module that people write, tests included."""
    return tuple(path for path in files() if path.suffix == ".py" and not is_generated(path))


def package_folders() -> list[str]:
    """Every folder below `PACKAGES` that holds modules, such as `common/actor`."""
    folders = {path.relative_to(ROOT).parent.as_posix() for path in modules()}
    return sorted(folder for folder in folders if folder.partition("/")[0] in PACKAGES)


def name_of(path: Path) -> str:
    """Path from the repository's root."""
    return path.relative_to(ROOT).as_posix()


def dotted(path: Path) -> str:
    """Import path of a module."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Absolute import paths in a module, those in functions and for types only included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found
