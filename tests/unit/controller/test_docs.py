"""The page about runs says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from services.controller.phase import ENDED, STATE_OF, TABLE, Phase

PAGE = Path(__file__).parents[3] / "docs" / "protocols" / "run.md"


def test_the_page_has_the_transition_table_of_the_code():
    text = PAGE.read_text()
    assert TABLE.markdown() in text, f"docs/protocols/run.md has to contain:\n{TABLE.markdown()}"


def test_the_page_explains_every_phase_and_draws_it():
    text = PAGE.read_text()
    glossary = dict(re.findall(r"^\| `([A-Z]+)` \| ([a-z]+|as before) \|", text, re.MULTILINE))
    assert glossary == {
        phase.name: STATE_OF[phase].value if phase in STATE_OF else "as before" for phase in Phase
    }
    diagram = text.partition("```mermaid")[2].partition("```")[0]
    assert {phase.name for phase in Phase} <= set(re.findall(r"[A-Z]{5,}", diagram))


def test_every_phase_can_be_reached_and_left():
    reached = {finish for _, finish in TABLE.moves}
    left = {start for start, _ in TABLE.moves}
    assert reached == set(Phase) - {Phase.PENDING}
    assert left == set(Phase) - ENDED
