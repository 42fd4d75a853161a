"""Of several ranks, rank 0 decides, and the others start the same tasks in the same order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.events import bodies
from common.ids import WORKERS, GroupId, LeaseId, Participant, Service
from common.step.machine import CommandTask, Lane, StepMachine
from common.step.partners import Partners
from common.step.place import Place
from common.step.schedule import Schedule
from common.step.tasks import Task
from tests.unit.step.test_machine import begun, starts
from tests.unit.step.test_schedule import PREPARED, VISION, event, plan, prefix

ENCODER = Service.PREFIX_ENCODER
ENCODERS = [Participant(service=ENCODER, rank=rank) for rank in range(4)]
EQUAL = Partners(dict.fromkeys(WORKERS, 2))
LANES = (
    Lane(name="data", tasks=(Task.PREPARE,), width=2),
    Lane(
        name="compute",
        tasks=(Task.PREFIX_BACKWARD, Task.POLICY_VISION, Task.POLICY_PREFIX),
        collective=True,
    ),
)


def machine(rank, lanes=LANES):
    made = StepMachine(
        lanes,
        needs_reference=False,
        participant=ENCODERS[rank],
        place=Place(rank=rank, degree=2),
        partners=EQUAL,
    )
    begun(made, groups=2, schedule=Schedule.ROLLPLEX)
    return made


def said(body, group=None, *, sender=ENCODERS[0]):
    return replace(event(body, group), sender=sender)


def command(number, task, group, *, sender=ENCODERS[0]):
    body = bodies.TaskCommanded(number=number, task=task, group=GroupId(group))
    return said(body, group, sender=sender)


def commands(instructions):
    return [(i.number, i.task, i.group) for i in instructions if isinstance(i, CommandTask)]


def test_rank_0_numbers_what_it_starts_in_collective_lanes_alone():
    leader = machine(0)
    first = leader.handle(said(PREPARED, 0))
    assert starts(first) == [(Task.POLICY_VISION, 0)]
    assert commands(first) == [(1, Task.POLICY_VISION, 0)]
    leader.handle(said(VISION, 0))
    leader.handle(said(PREPARED, 1))
    assert commands(leader.task_ended(Task.POLICY_VISION, GroupId(0))) == [
        (2, Task.POLICY_VISION, 1)
    ]


def test_a_single_rank_commands_nobody():
    only = StepMachine(LANES, needs_reference=False)
    begun(only, groups=2)
    assert not commands(only.handle(said(PREPARED, 0)))


def test_a_follower_starts_nothing_by_itself():
    follower = machine(1, LANES[1:])
    assert not starts(follower.handle(said(PREPARED, 0)))
    assert starts(follower.handle(command(1, Task.POLICY_VISION, 0))) == [(Task.POLICY_VISION, 0)]


def test_a_follower_keeps_the_order_of_the_numbers():
    follower = machine(1, LANES[1:])
    for group in range(2):
        follower.handle(said(PREPARED, group))
    assert not starts(follower.handle(command(2, Task.POLICY_VISION, 0)))
    assert starts(follower.handle(command(1, Task.POLICY_VISION, 1))) == [(Task.POLICY_VISION, 1)]
    assert starts(follower.task_ended(Task.POLICY_VISION, GroupId(1))) == [(Task.POLICY_VISION, 0)]


def test_a_follower_waits_for_inputs_of_its_own_rank():
    follower = machine(1, LANES[1:])
    follower.handle(said(PREPARED, 0))
    follower.handle(said(VISION, 0))
    assert not starts(follower.handle(command(1, Task.POLICY_PREFIX, 0)))
    assert not starts(follower.handle(said(bodies.WindowOpened())))
    follower.handle(said(bodies.WindowOpened(), sender=ENCODERS[1]))
    own = follower.handle(said(VISION, 0, sender=ENCODERS[1]))
    assert starts(own) == [(Task.POLICY_PREFIX, 0)]


def test_commands_of_another_service_are_not_for_it():
    follower = machine(1, LANES[1:])
    follower.handle(said(PREPARED, 0))
    other = Participant(service=Service.REFERENCE)
    assert not starts(follower.handle(command(1, Task.POLICY_VISION, 0, sender=other)))


def test_commands_of_an_older_epoch_are_forgotten():
    follower = machine(1, LANES[1:])
    follower.handle(command(1, Task.POLICY_VISION, 0))
    follower.handle(event(bodies.StepBegan(plan=plan(groups=2, epoch=2)), epoch=2))
    assert not starts(follower.handle(replace(said(PREPARED, 0), epoch=2)))


@pytest.mark.parametrize(("rank", "lease"), [(0, LeaseId(7)), (1, LeaseId(8))])
def test_a_view_has_the_leases_of_its_own_rank(rank, lease):
    made = machine(rank)
    for sender, number in zip(ENCODERS[:2], (7, 8), strict=True):
        body = replace(prefix(bodies.ModelRole.POLICY), lease=LeaseId(number))
        made.handle(said(body, 0, sender=sender))
    assert made.view.groups[GroupId(0)].prefixes[bodies.ModelRole.POLICY].lease == lease


@pytest.mark.parametrize("rank", range(2))
def test_a_failed_task_of_any_rank_is_seen_by_all(rank):
    made = machine(rank)
    failed = bodies.TaskFailed(task="x", code="internal", type="X", message="m", retryable=True)
    made.handle(said(failed, sender=ENCODERS[1]))
    assert made.view.failed == failed
