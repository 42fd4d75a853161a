"""The page, the enum and the table say the same."""

from __future__ import annotations

import re
from pathlib import Path

from services.broker.leases import TOMBSTONES
from services.broker.lifecycle import TRANSITIONS, LeaseState

PAGE = (Path(__file__).parents[3] / "docs/protocols/broker.md").read_text()


def test_table_is_the_codes() -> None:
    assert TRANSITIONS.markdown() in PAGE


def test_every_state_is_explained() -> None:
    explained = re.findall(r"^\| ([A-Z]+) \|", PAGE.split("This table is printed")[0], re.MULTILINE)
    assert explained == [state.name for state in LeaseState]


def test_diagram_has_the_tables_moves() -> None:
    drawn = set(re.findall(r"([A-Z]+) --> ([A-Z]+)", PAGE))
    assert drawn == {(start.name, finish.name) for start, finish in TRANSITIONS.moves}


def test_limits_are_the_codes() -> None:
    assert f"newest {TOMBSTONES:,}" in PAGE
