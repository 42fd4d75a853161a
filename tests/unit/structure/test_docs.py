from __future__ import annotations

import re
from typing import TYPE_CHECKING

from common.config.deployment import Deployment
from common.ids import Participant, Service
from common.registry import keys
from common.step.tasks import Task
from tests.unit.structure.source import ROOT, files, name_of, package_folders

if TYPE_CHECKING:
    from pathlib import Path

STRUCTURES = ROOT / "docs" / "structures.md"
LIMIT_LINES = 150


def pages() -> list[Path]:
    return [path for path in files() if path.suffix == ".md"]


def test_structures_page_is_short() -> None:
    assert len(STRUCTURES.read_text().splitlines()) < LIMIT_LINES


def test_every_package_is_named_and_every_named_package_exists() -> None:
    _, _, after = STRUCTURES.read_text().partition("\n## Packages\n")
    section = after.partition("\n## ")[0]
    named = {name.rstrip("/") for name in re.findall(r"`([a-z0-9_/]+/)`", section)}
    # A folder whose modules are all in its subfolders is named by them.
    with_modules = {
        folder
        for folder in package_folders()
        if any(path.name != "__init__.py" for path in (ROOT / folder).glob("*.py"))
        or not any(other.startswith(f"{folder}/") for other in package_folders())
    }
    assert with_modules - named == set(), "packages that the page does not name"
    assert {name for name in named if not (ROOT / name).is_dir()} == set()


def test_ports_are_those_of_the_default_deployment() -> None:
    text = STRUCTURES.read_text()
    deployment = Deployment(node="here")
    for service in Service:
        participant = Participant(service=service)
        (row,) = re.findall(rf"^\| `{participant}` \|.*$", text, re.MULTILINE)
        ports = [cell.strip() for cell in row.split("|")[-3:-1]]
        assert ports == [
            deployment.grpc_address(participant).rpartition(":")[2],
            deployment.http_address(participant).rpartition(":")[2],
        ]


def test_redis_keys_are_those_of_the_registry() -> None:
    assert keys.__doc__ is not None
    rows = [line for line in keys.__doc__.splitlines() if line.startswith("|")]
    assert len(rows) > 3
    assert "\n".join(rows) in STRUCTURES.read_text()


def test_life_of_a_step_names_every_task() -> None:
    _, _, after = STRUCTURES.read_text().partition("\n## The life of one training step\n")
    section = after.partition("\n## ")[0]
    assert [task for task in Task if f"`{task}`" not in section] == []


def test_links_lead_somewhere() -> None:
    broken = [
        f"{name_of(page)}: {target}"
        for page in pages()
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        if not re.match(r"[a-z]+:|#", target)
        and not (page.parent / target.partition("#")[0]).exists()
    ]
    assert broken == []


def test_modules_and_folders_in_the_text_exist() -> None:
    wanted = re.compile(r"`((?:common|services|rollplex|deploy|examples|bench|protos)/[\w/.]+)`")
    gone = [
        f"{name_of(page)}: {name}"
        for page in pages()
        for name in wanted.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    ]
    assert gone == []
