"""Of several replicas each works on its groups, and the update waits for those of all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.events import bodies
from common.ids import GroupId, LeaseId, Participant, Service
from common.step.machine import ForgetGroup, Lane, StepMachine
from common.step.place import Place
from common.step.plan import StepMode
from common.step.schedule import Schedule
from common.step.tasks import Task
from common.step.view import StepView
from tests.unit.step.test_machine import starts
from tests.unit.step.test_schedule import DONE, PREPARED, REWARDED, event, generated, plan

LEARN = Lane(name="compute", tasks=(Task.UPDATE, Task.RESPONSE_TRAIN), collective=True)
PREPARE = Lane(name="data", tasks=(Task.PREPARE, Task.AHEAD_PREPARE), width=9)
TRAINED = bodies.ResponsesTrained(lease=LeaseId(5))
DROPPED = bodies.GroupDropped(code="x", reason="x", sample=0)


def shared(replicas=2, **options):
    """A plan whose groups are the replicas' in turn."""
    made = plan(Schedule.SERIAL, **options)
    bound = {
        kind: tuple(
            replace(group, replica=group.group % replicas, rollout_replica=group.group % replicas)
            for group in getattr(made, kind)
        )
        for kind in ("groups", "ahead")
    }
    return replace(made, **bound)


def said(body, group=None, *, rank=0, service=Service.LEARNER):
    return replace(event(body, group), sender=Participant(service=service, rank=rank))


def machine(rank, *, degree=1, replicas=2, lanes=(LEARN,), room=None, **options):
    place = Place(rank=rank, degree=degree, replicas=replicas)
    who = Participant(service=Service.LEARNER, rank=rank)
    made = StepMachine(lanes, needs_reference=False, participant=who, place=place)
    began = bodies.StepBegan(plan=shared(replicas, **options), lease_room_bytes=room or {})
    made.handle(event(began))
    return made


def done(group, rank):
    """All that happens to a group of a rank, but for its reward, which is for all ranks."""
    return [said(body, group, rank=rank) for body in (generated(), TRAINED, DONE)]


def test_numbers_of_ranks():
    places = [Place(rank=rank, degree=2, replicas=3) for rank in range(6)]
    assert [(p.replica, p.tensor_rank, p.leader, p.leads) for p in places[:4]] == [
        (0, 0, 0, True),
        (0, 1, 0, False),
        (1, 0, 2, True),
        (1, 1, 2, False),
    ]
    assert places[5].leader == 4
    assert places[5].in_replica == Place(rank=1, degree=2)
    assert {place.world for place in places} == {6}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_works_on_its_groups_alone(rank):
    made = machine(rank, lanes=(PREPARE,), groups=5)
    mine = [GroupId(group) for group in range(5) if group % 2 == rank]
    assert list(made.view.groups) == mine
    assert [task for task in made.running if task[0] is Task.PREPARE] == [
        (Task.PREPARE, group) for group in mine
    ]


def test_work_ahead_is_the_replicas_own():
    made = machine(1, lanes=(PREPARE,), groups=1, ahead=4)
    assert made.running == [(Task.AHEAD_PREPARE, 1), (Task.AHEAD_PREPARE, 3)]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_update_waits_for_the_groups_of_all_replicas(rank):
    made = machine(rank, groups=3)
    began = []
    for group in range(3):
        for one in [*done(group, group % 2), said(REWARDED, group, rank=group % 2)]:
            assert (Task.UPDATE, None) not in began
            began += starts(made.handle(one))
    assert (Task.UPDATE, None) in began
    assert made.view.response_tokens == 3 * generated().response_tokens
    assert made.view.has_gradient


def test_a_replica_without_a_group_updates_too():
    made = machine(1, groups=1)
    assert made.view.groups == {}
    assert made.view.accumulated
    assert not made.running
    for one in done(0, 0):
        made.handle(one)
    assert starts(made.handle(said(REWARDED, 0))) == [(Task.UPDATE, None)]


def test_a_dropped_group_of_another_replica_is_waited_for_no_more():
    made = machine(1, groups=1)
    instructions = made.handle(said(DROPPED, 0))
    assert starts(instructions) == [(Task.UPDATE, None)]
    assert not any(isinstance(one, ForgetGroup) for one in instructions)
    assert not made.view.has_gradient


@pytest.mark.parametrize(("sender", "seen"), [(0, False), (1, False), (2, True), (3, False)])
def test_of_another_replica_its_deciding_rank_is_heard(sender, seen):
    view = StepView(
        shared(groups=2), needs_reference=False, place=Place(rank=1, degree=2, replicas=2)
    )
    view.apply(said(generated(), 1, rank=sender))
    assert (view.everyone[GroupId(1)].generated is not None) == seen


def test_a_window_is_the_replicas_own():
    view = StepView(shared(groups=2), needs_reference=False, place=Place(rank=1, replicas=2))
    assert not view.apply(said(bodies.WindowOpened(), rank=0))
    assert not view.window_opened
    assert view.apply(said(bodies.WindowOpened(), rank=1))


def test_commands_are_of_the_replicas_own_deciding_rank():
    made = machine(3, degree=2, groups=2)
    for body in (PREPARED, REWARDED):
        made.handle(said(body, 1, rank=2))
    for group, rank in ((0, 0), (1, 3)):
        for one in done(group, rank):
            made.handle(one)
    made.handle(said(REWARDED, 0, rank=0))
    command = bodies.TaskCommanded(number=1, task=Task.UPDATE, group=None)
    assert not starts(made.handle(said(command, rank=0)))
    assert starts(made.handle(said(command, rank=2))) == [(Task.UPDATE, None)]


def test_replicas_share_the_hosts_room_for_leases():
    room = {"cpu": 101, "GPU-1": 7}
    assert machine(1, groups=1, room=room).view.lease_room_bytes == {"cpu": 50, "GPU-1": 7}
    assert machine(0, replicas=1, groups=1, room={"cpu": 101}).view.lease_room_bytes == {"cpu": 101}


def test_the_whole_view_has_what_every_deciding_rank_says():
    place = Place(degree=2, replicas=2)
    view = StepView(shared(groups=2), needs_reference=False, place=place, whole=True)
    assert [view.apply(said(bodies.WindowOpened(), rank=rank)) for rank in range(4)] == [
        True,
        False,
        True,
        False,
    ]
    for rank in range(4):
        view.apply(said(generated(rank), rank // 2, rank=rank))
    assert [group.generated.decode_iteration for group in view.groups.values()] == [0, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_evaluation_ends_with_the_last_replica(rank):
    made = machine(rank, lanes=(PREPARE,), groups=2, mode=StepMode.EVAL)
    for group in range(2):
        assert made.view is not None
        made.handle(said(generated(), group, rank=group))
        made.handle(said(REWARDED, group, rank=group))
    assert made.view is None
