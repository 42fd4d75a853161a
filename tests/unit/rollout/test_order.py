from __future__ import annotations

import pytest

from common.vlm.tiny import tiny_config, tiny_prompt
from services.rollout.engines.errors import EngineStateInvalid, GroupRequestInvalid
from services.rollout.engines.order import AdmissionOrder
from services.rollout.engines.protocol import GroupRequest

PROMPT = tiny_prompt(tiny_config())


def request(group):
    return GroupRequest(group=group, prompt=PROMPT)


def test_groups_are_taken_in_the_order_of_the_step_whatever_comes_first():
    order = AdmissionOrder((3, 1, 2))
    order.add(request(2))
    order.add(request(1))
    assert not order.next_is_ready
    assert order.next_group == 3
    order.add(request(3))
    assert [order.take_next().group for _ in range(3)] == [3, 1, 2]
    assert order.next_group is None
    assert not order.next_is_ready


def test_a_dropped_group_is_passed_over():
    order = AdmissionOrder((0, 1, 2))
    order.add(request(2))
    order.drop(0)
    order.drop(0)
    assert order.next_group == 1
    order.drop(1)
    assert order.take_next().group == 2
    assert order.next_group is None


def test_a_group_can_be_dropped_at_any_point_and_stays_so():
    order = AdmissionOrder((0, 1, 2))
    for group in (0, 1):
        order.add(request(group))
    order.drop(0)
    assert order.take_next().group == 1
    order.drop(1)
    order.drop(2)
    for group in (0, 1, 2):
        order.add(request(group))
    assert order.next_group is None
    assert not order.next_is_ready


def test_calls_out_of_order_are_refused_by_name():
    order = AdmissionOrder((0, 1))
    with pytest.raises(GroupRequestInvalid, match=r"group 7 is not in the step: must be one of"):
        order.add(request(7))
    order.add(request(0))
    with pytest.raises(EngineStateInvalid, match="group 0 was added already"):
        order.add(request(0))
    order.take_next()
    with pytest.raises(EngineStateInvalid, match="group 0 was added already"):
        order.add(request(0))
    with pytest.raises(GroupRequestInvalid, match="group 7 is not in the step"):
        order.drop(7)
    with pytest.raises(GroupRequestInvalid, match="each only once"):
        AdmissionOrder((1, 1))
