"""Order and lanes of the tasks that a service starts."""

from __future__ import annotations

from common.events import bodies
from common.events.bodies import ModelRole
from common.ids import GroupId
from common.step.machine import EndStep, ForgetGroup, Lane, StartStep, StartTask, StepMachine
from common.step.schedule import Schedule
from common.step.tasks import Task
from tests.unit.step.test_schedule import (
    PREPARED,
    VISION,
    ahead_done,
    event,
    generated,
    plan,
    prefix,
)

LANES = (
    Lane(name="data", tasks=(Task.PREPARE,), width=2),
    Lane(name="compute", tasks=(Task.POLICY_VISION, Task.POLICY_PREFIX)),
)


def begun(machine, **kwargs):
    return machine.handle(
        event(bodies.StepBegan(plan=plan(**kwargs)), epoch=kwargs.get("epoch", 1))
    )


def starts(instructions):
    return [(i.task, i.group) for i in instructions if isinstance(i, StartTask)]


def test_a_lane_runs_no_more_than_its_width():
    machine = StepMachine(LANES, needs_reference=False)
    first = begun(machine, groups=3)
    assert isinstance(first[0], StartStep)
    assert starts(first) == [(Task.PREPARE, 0), (Task.PREPARE, 1)]
    assert starts(machine.task_ended(Task.PREPARE, GroupId(0))) == [(Task.PREPARE, 2)]
    machine.validate()


def test_a_task_starts_once():
    machine = StepMachine(LANES, needs_reference=False)
    begun(machine, groups=1)
    assert starts(machine.handle(event(PREPARED, 0))) == [(Task.POLICY_VISION, 0)]
    assert starts(machine.handle(event(PREPARED, 0))) == []
    assert starts(machine.task_ended(Task.POLICY_VISION, GroupId(0))) == []


def test_preference_comes_before_group_order():
    machine = StepMachine(LANES, needs_reference=False)
    begun(machine, schedule=Schedule.FUSED, groups=2)
    machine.handle(event(PREPARED, 0))
    machine.handle(event(VISION, 0))
    machine.handle(event(PREPARED, 1))
    assert starts(machine.task_ended(Task.POLICY_VISION, GroupId(0))) == [(Task.POLICY_VISION, 1)]


def test_a_strict_lane_keeps_group_order():
    lane = Lane(name="engine", tasks=(Task.DECODE,), width=8, strict=True)
    machine = StepMachine((lane,), needs_reference=False)
    begun(machine, groups=3)
    assert starts(machine.handle(event(VISION, 1))) == []
    assert starts(machine.handle(event(VISION, 0))) == [(Task.DECODE, 0), (Task.DECODE, 1)]


def test_a_strict_lane_skips_dropped_groups():
    lane = Lane(name="engine", tasks=(Task.DECODE,), width=8, strict=True)
    machine = StepMachine((lane,), needs_reference=False)
    begun(machine, groups=2)
    machine.handle(event(VISION, 1))
    drop = bodies.GroupDropped(code="c", reason="r", sample=0)
    assert machine.handle(event(drop, 0)) == [
        ForgetGroup(group=GroupId(0)),
        StartTask(task=Task.DECODE, group=GroupId(1)),
    ]


def test_a_task_that_is_not_admitted_is_passed_over_and_asked_for_again():
    asked = []

    def admits(view, started, wanted):
        asked.append((wanted, (Task.POLICY_VISION, 0) in started))
        return wanted[1] == 1 or view.groups[0].vision is not None

    lane = Lane(name="compute", tasks=(Task.POLICY_VISION,), admits=admits)
    machine = StepMachine((lane,), needs_reference=False)
    begun(machine, groups=2)
    assert starts(machine.handle(event(PREPARED, 0))) == []
    assert starts(machine.handle(event(PREPARED, 1))) == [(Task.POLICY_VISION, 1)]
    assert starts(machine.task_ended(Task.POLICY_VISION, GroupId(1))) == []
    assert starts(machine.handle(event(VISION, 0))) == [(Task.POLICY_VISION, 0)]
    assert asked[-1] == ((Task.POLICY_VISION, 0), False)


def test_a_new_epoch_ends_the_older_one():
    machine = StepMachine(LANES, needs_reference=False)
    begun(machine, groups=1)
    again = begun(machine, groups=1, epoch=2)
    assert [type(i) for i in again] == [EndStep, StartStep, StartTask]
    assert machine.handle(event(PREPARED, 0, epoch=1)) == []


def test_an_abort_ends_the_step():
    machine = StepMachine(LANES, needs_reference=False)
    begun(machine, groups=1)
    assert machine.handle(event(bodies.StepAborted(reason="why"))) == [EndStep(reason="why")]
    assert starts(machine.task_ended(Task.PREPARE, GroupId(0))) == []
    machine.validate()


def test_a_published_update_ends_the_step():
    machine = StepMachine(LANES, needs_reference=False)
    begun(machine, groups=1)
    machine.handle(event(generated(), 0))
    published = bodies.WeightsPublished(weights_version=1)
    assert machine.handle(event(published)) == [EndStep(reason="finished")]


def test_work_ahead_comes_last_and_in_its_own_order():
    lanes = (
        Lane(name="data", tasks=(Task.PREPARE, Task.AHEAD_PREPARE), width=2),
        Lane(name="compute", tasks=(Task.POLICY_PREFIX, Task.AHEAD_VISION, Task.AHEAD_REFERENCE)),
    )
    machine = StepMachine(lanes, needs_reference=True)
    assert starts(begun(machine, schedule=Schedule.FUSED, groups=1, ahead=3)) == [(Task.PREPARE, 0)]
    assert starts(machine.handle(event(PREPARED, 0))) == []
    opened = machine.handle(event(bodies.WindowOpened()))
    assert starts(opened) == [(Task.AHEAD_PREPARE, 0)]
    assert starts(machine.task_ended(Task.PREPARE, GroupId(0))) == [(Task.AHEAD_PREPARE, 1)]
    for index in (0, 1):
        machine.handle(ahead_done(Task.AHEAD_PREPARE, index))
    assert starts(machine.handle(event(VISION, 0))) == [(Task.POLICY_PREFIX, 0)]
    for role in ModelRole:
        assert starts(machine.handle(event(prefix(role), 0))) == []
    order = [(Task.POLICY_PREFIX, 0)]
    while following := starts(machine.task_ended(*order[-1])):
        order += following
    assert order[1:] == [
        (Task.AHEAD_VISION, 0),
        (Task.AHEAD_VISION, 1),
        (Task.AHEAD_REFERENCE, 0),
        (Task.AHEAD_REFERENCE, 1),
    ]
    machine.validate()
