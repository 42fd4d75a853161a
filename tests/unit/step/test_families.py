"""Replicas of training and of the rollout that share groups, be there equally many or not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.events import bodies
from common.ids import GroupId, LeaseId, Participant, Service
from common.step.machine import Lane, StepMachine
from common.step.place import Place
from common.step.plan import StepMode
from common.step.reference_use import reference_weights_needed
from common.step.schedule import Condition, Schedule
from common.step.tasks import Task
from common.step.view import StepView
from tests.unit.step.test_machine import starts
from tests.unit.step.test_partners import bound, learner, rollout, sides
from tests.unit.step.test_replicas import DROPPED, said
from tests.unit.step.test_schedule import DONE, PREPARED, REWARDED, VISION, event, generated, plan

CLOSED = bodies.WindowClosed(decode_iterations=1, response_tokens=1)
ONE_TO_TWO = sides(1, 1, replicas=(1, 2))
TWO_TO_ONE = sides(1, 1, replicas=(2, 1))


def view_of(whose, partners, schedule=Schedule.ROLLPLEX, *, needs_reference=False, **options):
    place = Place(
        rank=whose.rank,
        degree=partners.count(whose.service),
        replicas=partners.replica_count(whose.service),
    )
    return StepView(
        bound(plan(schedule, **options), partners),
        needs_reference=needs_reference,
        place=place,
        partners=partners,
        whose=whose,
    )


def of_rollout(body, group=None, *, rank=0):
    return said(body, group, rank=rank, service=Service.ROLLOUT)


def vision(lease, group, *, rank):
    body = replace(VISION, lease=LeaseId(lease))
    return said(body, group, rank=rank, service=Service.PREFIX_ENCODER)


def test_each_side_has_the_groups_that_are_bound_to_its_replica():
    for whose, groups in ((learner(0), [0, 1, 2]), (rollout(0), [0, 2]), (rollout(1), [1])):
        assert list(view_of(whose, ONE_TO_TWO).groups) == groups
    for whose, groups in ((learner(0), [0, 2]), (learner(1), [1]), (rollout(0), [0, 1, 2])):
        assert list(view_of(whose, TWO_TO_ONE).groups) == groups


def test_a_window_is_open_while_any_replica_of_the_rollout_decodes():
    view = view_of(learner(0), ONE_TO_TWO)
    seen = []
    for body, rank in (
        (bodies.WindowOpened(), 1),
        (bodies.WindowOpened(), 0),
        (CLOSED, 1),
        (CLOSED, 0),
    ):
        assert view.apply(of_rollout(body, rank=rank))
        seen.append((view.window_opened, view.window_open, view.window_closed))
    assert seen == [(True, True, False)] * 3 + [(True, False, True)]


def test_a_replica_that_never_opened_its_window_closes_it_all_the_same():
    view = view_of(rollout(1), ONE_TO_TWO)
    assert not view.apply(of_rollout(CLOSED, rank=0))
    assert view.apply(of_rollout(CLOSED, rank=1))
    assert view.window_closed
    assert not view.window_opened


def test_a_rollout_reads_the_partner_in_each_replica_that_trains_its_groups():
    partners = sides(2, 4, replicas=(2, 1))
    view = view_of(rollout(3), partners, groups=2)
    for rank in range(4):
        for group in range(2):
            read = view.apply(vision(rank, group, rank=rank))
            assert read == (rank == 1 + 2 * group)
    leases = [group.vision.lease for group in view.groups.values()]
    assert leases == [LeaseId(1), LeaseId(3)]


def test_training_reads_the_partner_in_the_replica_that_decodes_the_group():
    partners = sides(4, 2, replicas=(1, 2))
    view = view_of(learner(2), partners, groups=2)
    for rank in range(4):
        for group in range(2):
            read = view.apply(of_rollout(generated(rank), group, rank=rank))
            assert read == (rank == 1 + 2 * group)
    iterations = [group.generated.decode_iteration for group in view.groups.values()]
    assert iterations == [1, 3]


def test_the_rollout_is_over_where_nothing_decodes_any_more_beside():
    """Its ranks are on the GPUs of both replicas of training."""
    view = view_of(learner(0), TWO_TO_ONE, groups=2)
    for group, over in ((0, False), (1, True)):
        assert view.apply(of_rollout(generated(), group))
        view.apply(of_rollout(REWARDED, group))
        assert view.rollout_over == over
        assert view.holds(Condition.ROLLOUT_OVER, None) == over


def test_what_another_family_decodes_is_not_waited_for():
    partners = sides(1, 1, replicas=(2, 4))
    view = view_of(learner(0), partners, groups=4)
    for group in range(2):
        view.apply(of_rollout(generated(), group, rank=group))
        view.apply(of_rollout(REWARDED, group, rank=group))
    assert view.rollout_over
    assert not view.accumulated_everywhere


def test_reference_weights_come_back_beside_the_last_groups_that_decode_anywhere_beside():
    view = view_of(learner(0), TWO_TO_ONE, Schedule.SERIAL, groups=4, needs_reference=True)
    for group in range(4):
        assert reference_weights_needed(view) == (group == 3)
        view.apply(of_rollout(generated(), group))
        view.apply(of_rollout(REWARDED, group))
    assert reference_weights_needed(view)


def completed(view, group, iteration):
    """It is decoded, rewarded and has its prefix."""
    rank = group % 2
    view.apply(of_rollout(generated(iteration), group, rank=rank))
    view.apply(of_rollout(REWARDED, group, rank=rank))


def may_train(view):
    return [
        group
        for group, state in view.groups.items()
        if state.generated and view.holds(Condition.PREVIOUS_DONE, state)
    ]


def test_groups_of_several_replicas_train_in_the_order_of_completion():
    """However their events come: another replica may still complete one before."""
    view = view_of(learner(0), ONE_TO_TWO, Schedule.FUSED, groups=4)
    completed(view, 0, iteration=5)
    assert may_train(view) == []
    completed(view, 1, iteration=4)
    assert may_train(view) == [1]
    view.apply(said(DONE, 1))
    assert may_train(view) == [1]
    completed(view, 3, iteration=7)
    assert may_train(view) == [0, 1]
    view.apply(said(DONE, 0))
    assert may_train(view) == [0, 1]
    completed(view, 2, iteration=9)
    assert may_train(view) == [0, 1, 3]


def test_of_one_iteration_the_first_group_is_the_first():
    view = view_of(learner(0), ONE_TO_TWO, Schedule.FUSED, groups=4)
    completed(view, 1, iteration=5)
    completed(view, 2, iteration=5)
    assert may_train(view) == [1]
    view.apply(said(DONE, 1))
    completed(view, 3, iteration=5)
    assert may_train(view) == [1, 2]


def test_a_replica_whose_groups_are_dropped_completes_none():
    view = view_of(learner(0), ONE_TO_TWO, Schedule.FUSED, groups=2)
    completed(view, 0, iteration=5)
    assert may_train(view) == []
    view.apply(said(DROPPED, 1))
    assert may_train(view) == [0]


def test_a_replica_without_a_group_completes_none():
    view = view_of(learner(0), ONE_TO_TWO, Schedule.FUSED, groups=1)
    completed(view, 0, iteration=5)
    assert may_train(view) == [0]


def test_work_ahead_for_another_replicas_group_is_nothing_to_a_rollout():
    view = view_of(rollout(0), ONE_TO_TWO, groups=1, ahead=2)
    done = bodies.AheadDone(task=Task.AHEAD_PREPARE, index=GroupId(1))
    assert list(view.ahead) == [0]
    assert view.apply(said(done, service=Service.PREFIX_ENCODER))
    assert view.ahead[GroupId(0)].done == set()


def machine(whose, partners, lanes, **options):
    view = view_of(whose, partners, **options)
    made = StepMachine(
        lanes,
        needs_reference=False,
        participant=whose,
        place=view.place,
        partners=partners,
    )
    return made, made.handle(event(bodies.StepBegan(plan=view.plan)))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rollout_without_a_group_does_nothing_and_ends_with_the_step(rank):
    decode = Lane(name="engine", tasks=(Task.DECODE,), width=9, strict=True)
    made, _ = machine(rollout(rank), ONE_TO_TWO, (decode,), groups=1, mode=StepMode.EVAL)
    said_of = [
        said(PREPARED, 0, service=Service.PREFIX_ENCODER),
        vision(1, 0, rank=0),
    ]
    started = [one for each in said_of for one in starts(made.handle(each))]
    assert started == ([(Task.DECODE, 0)] if rank == 0 else [])
    made.handle(of_rollout(generated(), 0))
    made.handle(of_rollout(REWARDED, 0))
    assert made.view is None


def test_a_rollout_takes_groups_of_both_replicas_in_their_order():
    decode = Lane(name="engine", tasks=(Task.DECODE,), width=9, strict=True)
    made, _ = machine(rollout(0), TWO_TO_ONE, (decode,), groups=3)
    for group in range(3):
        made.handle(said(PREPARED, group, rank=group % 2, service=Service.PREFIX_ENCODER))
    assert not starts(made.handle(vision(1, 1, rank=1)))
    assert starts(made.handle(vision(0, 0, rank=0))) == [(Task.DECODE, 0), (Task.DECODE, 1)]
    assert starts(made.handle(vision(2, 2, rank=0))) == [(Task.DECODE, 2)]


def test_the_whole_view_has_the_first_rank_of_every_replica():
    partners = sides(2, 1, replicas=(2, 4))
    view = StepView(
        bound(plan(groups=4), partners),
        needs_reference=False,
        place=Place(degree=2, replicas=2),
        partners=partners,
        whose=Participant(service=Service.LEARNER),
        whole=True,
    )
    assert all(view.apply(of_rollout(bodies.WindowOpened(), rank=rank)) for rank in range(4))
    for rank in range(4):
        for group in range(4):
            seen = view.apply(of_rollout(generated(rank), group, rank=rank))
            assert seen == (group == rank)
            read = view.apply(said(bodies.ResponsesTrained(lease=None), group, rank=rank))
            assert read == (rank == 2 * (group // 2))
