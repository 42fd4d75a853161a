"""The page, the enums and the tables say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.gpu.context import CONTEXT_BYTES
from common.worker.own_memory import STEP_BYTES, STEP_SHARE
from services.broker import lifecycle, residence
from services.broker.arena_cuda import MARGIN_BYTES, UNLISTED_BYTES
from services.broker.leases import TOMBSTONES
from services.broker.ledger import TABLE_ROWS
from services.broker.spilling import AGAIN_NS

PAGE = (Path(__file__).parents[3] / "docs/protocols/broker.md").read_text()
LEASES, _, REST = PAGE.partition("## States of a storage")
STORAGES = REST.partition("## Messages")[0]

machines = pytest.mark.parametrize(
    ("section", "table", "states"),
    [
        (LEASES, lifecycle.TRANSITIONS, lifecycle.LeaseState),
        (STORAGES, residence.TRANSITIONS, residence.Residence),
    ],
    ids=["leases", "storages"],
)


@machines
def test_table_is_the_codes(section, table, states) -> None:
    assert table.markdown() in section


@machines
def test_every_state_is_explained(section, table, states) -> None:
    before = section.split("This table is printed")[0]
    explained = re.findall(r"^\| ([A-Z]+) \|", before, re.MULTILINE)
    assert explained == [state.name for state in states]


@machines
def test_diagram_has_the_tables_moves(section, table, states) -> None:
    drawn = set(re.findall(r"([A-Z]+) --> ([A-Z]+)", section))
    assert drawn == {(start.name, finish.name) for start, finish in table.moves}


def test_limits_are_the_codes() -> None:
    prose = " ".join(PAGE.split())
    assert f"newest {TOMBSTONES:,}" in PAGE
    assert f"may together take the device less {UNLISTED_BYTES >> 30} GiB" in prose
    assert f"changed by more than {STEP_BYTES >> 20} MiB or {STEP_SHARE:.0%}" in prose.replace(
        " %", "%"
    )
    assert f"{CONTEXT_BYTES >> 20} MiB where that is not possible" in prose
    assert f"the {TABLE_ROWS} largest rows" in prose
    assert f"of which {MARGIN_BYTES >> 30} GiB stays free" in PAGE
    assert AGAIN_NS * 2 == 10**9
    assert "twice a second" in PAGE
