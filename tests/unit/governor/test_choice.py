from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.governor.choice import MOST_TRIES, WITHIN_GAIN, ShareChooser, tried_shares
from common.governor.measurements import ENOUGH, Measurements
from common.governor.objective import WINDOW_LIMITED, WORK_LIMITED, value_of
from common.governor.rates import Rates
from common.step.tasks import Task
from tests.unit.governor.rates_of_tests import SHARES, TABLE

TASK = Task.RESPONSE_TRAIN
TOTAL = 132


def chooser(measured, shares=SHARES):
    return ShareChooser(shares, total_sms=TOTAL, table=TABLE, measured=measured)


@pytest.fixture
def measured():
    return Measurements(TABLE, total_sms=TOTAL)


def play(measured, truth, jobs, *, price=WORK_LIMITED, rows=8):
    """Jobs of one kind one after the other, each with the true rates of its share."""
    choosing = chooser(measured)
    for _ in range(2):
        measured.add_whole(TASK, 1.0)
    chosen = []
    for _ in range(jobs):
        share = choosing.choose(TASK, rows, price)
        rates = truth[share]
        measured.add_beside(TASK, 8, share, unit_s=1.0 / rates.background, decode_rate=rates.decode)
        chosen.append(share)
    return chosen


@pytest.mark.parametrize(
    ("total", "shares"),
    [(132, (40, 72, 96, 112)), (78, (24, 40, 56, 64)), (16, (8,)), (1, ())],
)
def test_tried_shares_are_whole_granules_spread_over_the_gpu(total, shares):
    assert tried_shares(total) == shares


def test_a_table_alone_decides_without_trying():
    choosing = chooser(None, (46, 66, 92))
    chosen = {choosing.choose(TASK, 8, WORK_LIMITED) for _ in range(20)}
    # (d + p - 1) / p: 0.26 / 0.45, 0.38 / 0.59 and 0.34 / 0.79
    assert chosen == {66}
    # (d + p - 1) / d: 0.26 / 0.81, 0.38 / 0.79 and 0.34 / 0.55
    assert choosing.choose(TASK, 8, WINDOW_LIMITED) == 92


def test_no_more_than_every_other_job_tries_something(measured):
    choosing = chooser(measured)
    usual = chooser(None).choose(TASK, 8, WORK_LIMITED)
    chosen = [choosing.choose(TASK, 8, WORK_LIMITED) for _ in range(4 * MOST_TRIES)]
    assert set(chosen[1::2]) == {usual}
    assert len(set(chosen)) > 2


def test_what_the_table_puts_too_far_behind_is_not_tried(measured):
    choosing = chooser(measured)
    chosen = {choosing.choose(TASK, 8, WORK_LIMITED) for _ in range(100)}
    gains = {share: TABLE.rates(TASK, 8, share, total_sms=TOTAL).gain for share in SHARES}
    within = {s for s, gain in gains.items() if gain >= max(gains.values()) - WITHIN_GAIN}
    assert chosen == within
    assert within < set(SHARES)


def test_jobs_that_give_no_samples_do_not_keep_it_trying(measured):
    choosing = chooser(measured)
    for _ in range(2 * MOST_TRIES * len(SHARES)):
        choosing.choose(TASK, 8, WORK_LIMITED)
    settled = {choosing.choose(TASK, 8, WORK_LIMITED) for _ in range(20)}
    assert len(settled) == 1


def test_the_measured_best_is_taken_in_the_end(measured):
    truth = {
        share: Rates(decode=1.05 - share / TOTAL, background=0.9 * share / TOTAL)
        for share in SHARES
    }
    truth[80] = Rates(decode=0.9, background=0.6)
    chosen = play(measured, truth, 60)
    assert set(chosen[-10:]) == {80}


def test_brackets_are_learnt_apart(measured):
    play(measured, dict.fromkeys(SHARES, Rates(decode=0.5, background=0.6)), 60)
    choosing = chooser(measured)
    assert choosing.rates(TASK, 8, 64) == Rates(decode=0.5, background=pytest.approx(0.6))
    assert choosing.rates(TASK, 9, 64) == TABLE.rates(TASK, 9, 64, total_sms=TOTAL)


@settings(deadline=None, max_examples=50)
@given(
    st.fixed_dictionaries(
        {
            share: st.builds(Rates, decode=st.floats(0.05, 1), background=st.floats(0.05, 1))
            for share in SHARES
        }
    ),
    st.floats(WORK_LIMITED, WINDOW_LIMITED),
)
def test_it_settles_on_a_share_that_no_known_one_beats(truth, price):
    measured = Measurements(TABLE, total_sms=TOTAL)
    chosen = play(measured, truth, 100, price=price)
    (last,) = set(chosen[-10:])
    tried = {share for share in SHARES if measured.samples(TASK, 8, share) >= ENOUGH}
    saving = [truth[share] for share in tried if truth[share].gain > 1]
    if saving and truth[last].gain > 1:
        best = max(value_of(rates, price) for rates in saving)
        assert value_of(truth[last], price) == pytest.approx(best, abs=1e-6)
