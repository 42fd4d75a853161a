"""Two looks at a decode that is simulated on an axis of time."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from common.governor.reading import Reading, decode_rate, iteration_s

MS = 1_000_000
ALONE_S = 0.01
ALONE_MS = 10.0


def look(at_ms: float, *, iterations: int, ended_ms: float, **fields: int) -> Reading:
    values = {"rows": 8, "admissions": 2} | fields
    return Reading(
        at_ns=round(at_ms * MS), iterations=iterations, ended_ns=round(ended_ms * MS), **values
    )


def steady(at_ms: float, start_ms: float, rate: float, *, phase: float, burst: int = 1) -> Reading:
    """A decode that goes on alone until `start_ms` and at `rate` from then on."""
    done = phase + 1000 + (min(at_ms, start_ms) + max(0.0, at_ms - start_ms) * rate) / ALONE_MS
    counted = math.floor(done / burst) * burst
    ended = at_ms - (done - counted) * ALONE_MS / (1.0 if at_ms <= start_ms else rate)
    if ended < start_ms < at_ms:
        ended = start_ms - (done - counted - (at_ms - start_ms) * rate / ALONE_MS) * ALONE_MS
    return look(at_ms, iterations=counted, ended_ms=ended, burst=burst)


@given(
    rate=st.floats(0.1, 1.0),
    phase=st.floats(0, 1),
    length_ms=st.floats(20, 400),
    burst=st.sampled_from([1, 4]),
)
def test_the_rate_of_a_steady_decode_is_found_from_any_phase(rate, phase, length_ms, burst):
    start = steady(500.0, 500.0, rate, phase=phase, burst=burst)
    end = steady(500.0 + length_ms, 500.0, rate, phase=phase, burst=burst)
    assume(end.iterations > start.iterations)
    found = decode_rate(start, end, ALONE_S)
    assert found is not None
    assert found == pytest.approx(rate, rel=0.01, abs=0.005)


def test_a_decode_that_stands_still_has_a_rate_below_one_iteration():
    start = look(100, iterations=50, ended_ms=97)
    end = look(300, iterations=50, ended_ms=97)
    found = decode_rate(start, end, ALONE_S)
    assert found is not None
    assert 0 < found < 10 / 200


def test_a_decode_that_stops_behind_its_first_iteration_is_not_taken_for_a_fast_one():
    start = look(100, iterations=50, ended_ms=95)
    end = look(300, iterations=51, ended_ms=105)
    found = decode_rate(start, end, ALONE_S)
    assert found is not None
    assert found <= 2 * 10 / 200


@pytest.mark.parametrize(
    ("start", "end"),
    [
        pytest.param(
            look(100, iterations=50, ended_ms=95),
            look(200, iterations=55, ended_ms=195, admissions=3),
            id="a group came in",
        ),
        pytest.param(
            look(100, iterations=50, ended_ms=40),
            look(200, iterations=55, ended_ms=195),
            id="it had been waiting",
        ),
        pytest.param(
            look(100, iterations=0, ended_ms=0),
            look(200, iterations=5, ended_ms=195),
            id="it has only begun",
        ),
        pytest.param(
            look(100, iterations=50, ended_ms=95),
            look(105, iterations=51, ended_ms=104),
            id="too short",
        ),
    ],
)
def test_what_cannot_be_told_is_not(start, end):
    assert decode_rate(start, end, ALONE_S) is None


def test_the_time_of_an_iteration_is_between_ends():
    start = look(100, iterations=50, ended_ms=95)
    assert iteration_s(start, look(200, iterations=58, ended_ms=175)) == pytest.approx(0.01)
    assert iteration_s(start, look(200, iterations=50, ended_ms=95)) is None
    never = look(100, iterations=0, ended_ms=0)
    assert iteration_s(never, look(200, iterations=8, ended_ms=175)) is None
