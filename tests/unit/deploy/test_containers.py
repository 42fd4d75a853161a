from __future__ import annotations

import re
import runpy
import shlex
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from common.ids import Service

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "deploy" / "containers").glob("Containerfile.*"))
KNOWN = {"FROM", "ARG", "RUN", "ENV", "WORKDIR", "COPY", "USER", "HEALTHCHECK", "CMD"}
USER = "10001:10001"

each = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def instructions(path: Path) -> list[tuple[str, str]]:
    """Keyword and arguments of each instruction, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    pairs = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(keyword, arguments.strip()) for keyword, _, arguments in pairs]


def stages(path: Path) -> list[list[tuple[str, str]]]:
    """Instructions, divided at each FROM."""
    found: list[list[tuple[str, str]]] = []
    for keyword, arguments in instructions(path):
        if keyword == "FROM":
            found.append([])
        found[-1].append((keyword, arguments))
    return found


def values(stage: list[tuple[str, str]], keyword: str) -> list[str]:
    return [arguments for name, arguments in stage if name == keyword]


def test_there_is_an_image_for_each_device() -> None:
    assert [path.suffix for path in FILES] == [".cpu", ".cuda"]


@each
def test_instructions_are_known(path: Path) -> None:
    assert {keyword for keyword, _ in instructions(path)} <= KNOWN


@each
def test_bases_are_pinned_and_name_no_registry_host(path: Path) -> None:
    names = {base.partition(" AS ")[2] for base in values(instructions(path), "FROM")}
    for base in values(instructions(path), "FROM"):
        image, _, tag = base.partition(" ")[0].partition(":")
        assert "." not in image.partition("/")[0]
        assert re.search(r"\d+\.\d+", tag), f"{base} is not pinned"
    assert "build" in names


@each
def test_copied_files_exist(path: Path) -> None:
    build, final = stages(path)
    sources = [name for copy in values(build, "COPY") for name in shlex.split(copy)[:-1]]
    for name in sources:
        assert (ROOT / name).exists(), f"COPY {name}: not there"
    assert values(final, "COPY") == ["--from=build /opt/rollplex /opt/rollplex"]


@each
def test_every_package_is_copied(path: Path) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["packages"]["find"]["include"]
    build, _ = stages(path)
    sources = [name for copy in values(build, "COPY") for name in shlex.split(copy)[:-1]]
    for pattern in patterns:
        assert any(fnmatch(name, pattern) for name in sources), f"no COPY brings {pattern}"
    assert settings["project"]["readme"] in sources


@each
def test_torch_is_the_one_of_the_makefile(path: Path) -> None:
    (made,) = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    build, _ = stages(path)
    assert f"TORCH={made}" in values(build, "ARG")


@each
def test_installed_extras_are_declared(path: Path) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build, _ = stages(path)
    (extras,) = re.findall(r"pip install '\.\[([a-z,]+)\]'", "\n".join(values(build, "RUN")))
    assert set(extras.split(",")) <= set(settings["project"]["optional-dependencies"])
    assert ("cuda" in extras) is (path.suffix == ".cuda")


@each
def test_image_runs_as_an_ordinary_user_and_is_asked_for_its_health(path: Path) -> None:
    _, final = stages(path)
    assert values(final, "USER") == [USER]
    assert f"useradd --uid {USER.partition(':')[0]} " in " ".join(values(final, "RUN"))
    (check,) = values(final, "HEALTHCHECK")
    assert check.endswith('CMD ["python", "-m", "deploy.containers.healthcheck"]')
    keywords = [keyword for keyword, _ in final]
    assert keywords.index("USER") > max(i for i, name in enumerate(keywords) if name == "RUN")


@pytest.mark.parametrize("service", list(Service))
def test_command_of_each_service_runs(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["-", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"services.{service.replace('-', '_')}", run_name="__main__")
    assert ended.value.code == 0
    assert "--config" in capsys.readouterr().out
