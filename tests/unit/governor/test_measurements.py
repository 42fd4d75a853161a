from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.governor.measurements import ENOUGH, REFRESH_STEPS, SAMPLES, Measurements
from common.governor.table import CoRun, CoRunTable
from common.step.tasks import Task
from tests.unit.governor.rates_of_tests import TABLE

TASK = Task.RESPONSE_TRAIN


@pytest.fixture
def measured():
    return Measurements(TABLE, total_sms=132)


def add(measured, *samples, task=TASK, bracket=8, share=64):
    for unit_s, decode_rate in samples:
        measured.add_beside(task, bracket, share, unit_s=unit_s, decode_rate=decode_rate)


def add_whole(measured, *units_s, task=TASK):
    for unit_s in units_s:
        measured.add_whole(task, unit_s)


def test_the_first_job_is_no_sample(measured):
    assert not measured.add_beside(TASK, 8, 64, unit_s=9.0, decode_rate=0.1)
    assert measured.samples(TASK, 8, 64) == 0
    assert measured.add_beside(TASK, 8, 64, unit_s=1.0, decode_rate=0.5)
    # another bracket of the same share has no first time of its own; another share has
    assert measured.add_beside(TASK, 16, 64, unit_s=1.0, decode_rate=0.5)
    assert not measured.add_beside(TASK, 16, 96, unit_s=1.0, decode_rate=0.5)


def test_rates_are_medians_over_the_fastest_time_alone(measured):
    add_whole(measured, 7.0, 1.0, 1.2, 1.1)
    add(measured, (9.0, 0.1), (2.0, 0.7), (2.2, 0.8), (50.0, 0.05))
    rates = measured.rates(TASK, 8, 64)
    assert rates.decode == pytest.approx(0.7)
    assert rates.background == pytest.approx(1.0 / 2.2)


def test_one_sample_is_not_enough(measured):
    add_whole(measured, 1.0, 1.0)
    add(measured, (9.0, 0.1), (2.0, 0.7))
    assert measured.rates(TASK, 8, 64) is None
    add(measured, (2.0, 0.7))
    assert measured.rates(TASK, 8, 64) is not None
    assert measured.rates(TASK, 8, 96) is None
    assert measured.rates(Task.REFERENCE_SCORE, 8, 64) is None


def test_old_samples_are_forgotten(measured):
    add_whole(measured, 1.0, 1.0)
    add(measured, *[(1.0, 0.2)] * (SAMPLES + 1))
    add(measured, *[(4.0, 0.9)] * SAMPLES)
    rates = measured.rates(TASK, 8, 64)
    assert (rates.decode, rates.background) == (0.9, 0.25)
    assert measured.samples(TASK, 8, 64) == SAMPLES


def test_a_kind_that_never_had_the_whole_gpu_is_measured_against_the_prior(measured):
    add(measured, (9.0, 0.1), (2.0, 0.7), (2.0, 0.7), share=66)
    add(measured, (9.0, 0.1), (1.5, 0.6), (1.5, 0.6), share=92)
    # the prior's rates are 0.59 and 0.79: the whole would take 1.18 or 1.185
    assert measured.rates(TASK, 8, 66).background == pytest.approx(0.59, abs=0.01)
    assert measured.rates(TASK, 8, 92).background == pytest.approx(0.79, abs=0.01)


@given(
    st.lists(st.tuples(st.floats(1e-6, 1e6), st.floats(1e-6, 10)), min_size=3, max_size=40),
    st.lists(st.floats(1e-6, 1e6), max_size=5),
)
def test_whatever_is_measured_makes_a_table_that_can_be_read_back(samples, whole):
    measured = Measurements(TABLE, total_sms=132)
    add_whole(measured, *whole)
    add(measured, *samples)
    found = measured.table("a GPU")
    assert CoRunTable.model_validate_json(found.resolved_json()) == found
    (entry,) = found.entries
    rates = measured.rates(TASK, 8, 64)
    assert (entry.task, entry.rows, entry.sms) == (TASK, 8, 64)
    assert entry.decode_rate == pytest.approx(rates.decode, abs=1e-3)
    assert entry.background_rate == pytest.approx(rates.background, abs=1e-3)


def test_a_table_has_an_entry_for_each_measured_share(measured):
    assert measured.table("a GPU") is None
    add_whole(measured, 1.0, 1.0)
    for share in (48, 64):
        for bracket in (8, 16):
            add(measured, *[(2.0, 0.7)] * (ENOUGH + 1), bracket=bracket, share=share)
    found = measured.table("a GPU")
    assert {(e.rows, e.sms) for e in found.entries} == {(8, 48), (8, 64), (16, 48), (16, 64)}
    assert found.entries[0] == CoRun(task=TASK, rows=8, sms=48, gain=1.2, background_rate=0.5)


def test_a_decode_alone_is_watched_until_it_is_known_and_again_later(measured):
    assert measured.alone_s(8) is None
    assert measured.ask_alone(8)
    assert not measured.ask_alone(8)  # once a step
    assert measured.ask_alone(16)
    measured.add_alone(8, 0.010)
    for _ in range(ENOUGH):
        measured.next_step()
        if measured.ask_alone(8):
            measured.add_alone(8, 0.012)
    assert measured.alone_s(8) == pytest.approx(0.011)
    asked = []
    for _ in range(2 * REFRESH_STEPS):
        measured.next_step()
        asked.append(measured.ask_alone(8))
    assert asked.count(True) == 2


def test_a_decode_that_could_not_be_measured_is_watched_in_the_next_step_again(measured):
    assert measured.ask_alone(8)
    for _ in range(3):
        measured.next_step()
        assert measured.ask_alone(8)
