from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.governor.objective import (
    WINDOW_LIMITED,
    WORK_LIMITED,
    WindowPrice,
    best_share,
    value_of,
)
from common.governor.rates import Rates, bracket_of
from common.step.tasks import Task

RATES = st.builds(Rates, decode=st.floats(0.01, 1), background=st.floats(0.01, 1))
KNOWN = st.dictionaries(st.integers(1, 132), RATES, min_size=1, max_size=6)


def rates(decode: float, background: float) -> Rates:
    return Rates(decode=decode, background=background)


def test_the_window_gets_dearer_while_work_fills_it_and_cheaper_while_it_does_not():
    price = WindowPrice()
    between = price.of(Task.REFERENCE_PREFIX)
    assert WORK_LIMITED < between < WINDOW_LIMITED
    price.window_closed(0.1)
    assert WORK_LIMITED < price.of(Task.AHEAD_VISION) < between
    for _ in range(20):
        price.window_closed(0.5)
    assert price.of(Task.REFERENCE_PREFIX) == WORK_LIMITED
    price.window_closed(0.0)
    assert price.of(Task.REFERENCE_PREFIX) > WORK_LIMITED
    for _ in range(20):
        price.window_closed(0.0)
    assert price.of(Task.REFERENCE_PREFIX) == WINDOW_LIMITED


def test_more_whole_groups_are_left_than_the_window_has_room_for():
    price = WindowPrice()
    for _ in range(20):
        price.window_closed(0.5)
    assert price.of(Task.RESPONSE_TRAIN) == price.of(Task.REFERENCE_SCORE) == WINDOW_LIMITED


def test_what_is_saved_is_counted_by_what_there_is_less_of():
    # Small share: a second of work costs little decode. Large share: much work a second of decode.
    known = {48: rates(0.8, 0.45), 96: rates(0.5, 0.8)}
    assert best_share(known, WORK_LIMITED) == 48
    assert best_share(known, WINDOW_LIMITED) == 96
    assert value_of(known[48], WORK_LIMITED) == pytest.approx(0.25 / 0.45)
    assert value_of(known[96], WINDOW_LIMITED) == pytest.approx(0.3 / 0.5)


def test_where_nothing_is_saved_the_least_is_lost():
    known = {48: rates(0.5, 0.4), 96: rates(0.2, 0.75)}
    for price in (WORK_LIMITED, WINDOW_LIMITED):
        assert best_share(known, price) == 96


def test_of_two_equal_shares_the_smaller_one_is_taken():
    same = rates(0.7, 0.6)
    for price in (WORK_LIMITED, WINDOW_LIMITED):
        assert best_share({96: same, 48: same, 64: same}, price) == 48


@given(KNOWN, st.floats(WORK_LIMITED, WINDOW_LIMITED))
def test_no_other_share_saves_more(known, price):
    best = known[best_share(known, price)]
    if any(each.gain > 1 for each in known.values()):
        assert best.gain > 1
        saving = [each for each in known.values() if each.gain > 1]
        assert value_of(best, price) == max(value_of(each, price) for each in saving)
    else:
        assert best.gain == max(each.gain for each in known.values())


@given(
    window=st.floats(1, 100),
    work=st.floats(1, 100),
    known=st.dictionaries(
        st.integers(1, 132),
        RATES.filter(lambda each: each.gain > 1),
        min_size=1,
        max_size=6,
    ),
)
def test_the_objective_that_fits_makes_the_shortest_step(window, work, known):
    """One share throughout; what is left of either runs alone."""

    def step_s(each: Rates) -> float:
        beside = min(window / each.decode, work / each.background)
        return beside + (window - beside * each.decode) + (work - beside * each.background)

    for price in (WORK_LIMITED, WINDOW_LIMITED):
        chosen = known[best_share(known, price)]
        fits = [
            each
            for each in known.values()
            if (work / each.background <= window / each.decode) is (price == WORK_LIMITED)
        ]
        if len(fits) == len(known):
            assert step_s(chosen) <= min(map(step_s, known.values())) + 1e-9 * (window + work)


@given(st.integers(1, 4096))
def test_a_bracket_is_the_next_power_of_two(rows):
    bracket = bracket_of(rows)
    assert bracket & (bracket - 1) == 0
    assert rows <= bracket < 2 * rows
