from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.bus import SequenceGap
from common.bus.event_log import EventLog
from protos.rollplex.v1 import events_pb2
from tests.unit.bus.events import group_event, step_began


def numbers(events):
    return [logged.event.seq for logged in events]


def test_numbers_begin_at_one_and_have_no_hole():
    log = EventLog()
    assert (log.head_seq, log.first_seq, log.after(0)) == (0, 1, [])
    assert numbers([log.append(group_event(g)) for g in range(3)]) == [1, 2, 3]
    assert numbers(log.after(1)) == [2, 3]


def test_delivery_carries_the_number():
    logged = EventLog().append(group_event(5))
    reply = events_pb2.HubReply.FromString(logged.delivery)
    assert (reply.deliver.seq, reply.deliver.group) == (1, 5)


def test_keeps_the_step_before_the_running_one_and_no_more():
    log = EventLog()
    for epoch in (1, 2, 3):
        log.append(step_began(epoch))
        for group in range(2):
            log.append(group_event(group, epoch=epoch))
    assert (log.first_seq, log.step_seq, log.head_seq) == (4, 7, 9)
    assert numbers(log.after(3)) == [4, 5, 6, 7, 8, 9]
    assert log.find("step-1") is None
    assert log.find("step-2").event.seq == 4
    with pytest.raises(SequenceGap, match=r"after 2 .* kept are 4 to 9"):
        log.after(2)


def test_number_that_was_never_given_is_a_gap():
    with pytest.raises(SequenceGap):
        EventLog().after(1)


def test_over_the_limit_the_oldest_goes_and_is_missed_loudly():
    log = EventLog(kept_limit=3)
    for group in range(5):
        log.append(group_event(group))
    assert numbers(log.after(2)) == [3, 4, 5]
    with pytest.raises(SequenceGap):
        log.after(1)
    assert log.step_seq == 3


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 20))
def test_any_history_replays_from_any_kept_place(steps, limit):
    log = EventLog(kept_limit=limit)
    began = [1]
    for index, is_step in enumerate(steps):
        log.append(step_began(index) if is_step else group_event(index))
        if is_step:
            began.append(log.head_seq)
    assert log.head_seq == len(steps)
    assert log.head_seq - log.first_seq + 1 <= limit
    assert log.step_seq == max(began[-1], log.first_seq)
    oldest = began[-2] if len(began) > 1 else 1
    assert log.first_seq == max(oldest, log.head_seq - limit + 1)
    for seq in range(log.first_seq - 1, log.head_seq + 1):
        assert numbers(log.after(seq)) == list(range(seq + 1, log.head_seq + 1))
