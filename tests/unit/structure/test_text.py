"""What no file may contain: places outside the repository, and things left for later."""

from __future__ import annotations

import re

from tests.unit.structure.source import files, name_of

# Put together here, so that this file does not contain them.
FOREIGN = ("/wo" + "rk/", "/r" + "oot/", "/ho" + "me/(?!rollplex)", r"\.lib" + "rary/")
REGISTRIES = (
    "py" + r"pi\.org",
    "python" + "hosted",
    "dock" + r"er\.io",
    "gh" + r"cr\.io",
    "qu" + r"ay\.io",
)
LATER = ("TO" + "DO", "FIX" + "ME", "X" + "XX")


def _hits(patterns: tuple[str, ...]) -> list[str]:
    wanted = re.compile("|".join(patterns))
    hits: list[str] = []
    for path in files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        hits += [
            f"{name_of(path)}:{number}: {line.strip()[:100]}"
            for number, line in enumerate(text.splitlines(), 1)
            if wanted.search(line)
        ]
    return hits


def test_no_file_names_a_place_outside_the_repository() -> None:
    assert _hits(FOREIGN) == []


def test_no_file_names_a_registry_host() -> None:
    assert _hits(REGISTRIES) == []


def test_nothing_is_left_for_later() -> None:
    assert _hits(tuple(rf"\b{word}\b" for word in LATER)) == []
