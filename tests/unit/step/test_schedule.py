"""The schedule table and the view that answers its conditions."""

from __future__ import annotations

import pytest

from common.events import Event, bodies
from common.events.bodies import ModelRole
from common.ids import Epoch, GroupId, LeaseId, Participant, RunId, Service, StepIndex
from common.ids import WeightsVersion as V
from common.step.place import Place
from common.step.plan import TRAIN_SPLIT, PlannedGroup, StepMode, StepPlan
from common.step.schedule import OWN_WEIGHTS, TABLE, Condition, Schedule
from common.step.tasks import AHEAD, OWNER, WEIGHTS_DEPENDENT, Task
from common.step.view import StepView

SENDER = Participant(service=Service.ROLLOUT)


def plan(schedule=Schedule.SERIAL, groups=3, mode=StepMode.TRAIN, epoch=1, ahead=0):
    return StepPlan(
        run_id=RunId("r"),
        step=StepIndex(0),
        epoch=Epoch(epoch),
        mode=mode,
        schedule=schedule,
        weights_version=V(0),
        groups=planned(range(groups)),
        samples_per_group=2,
        ahead=planned(range(groups, groups + ahead)),
    )


def planned(samples):
    return tuple(
        PlannedGroup(group=GroupId(index), split=TRAIN_SPLIT, sample=sample)
        for index, sample in enumerate(samples)
    )


def ahead_done(task, index):
    return event(bodies.AheadDone(task=task, index=GroupId(index)))


def event(body, group=None, epoch=1):
    return Event(
        sender=SENDER,
        run_id=RunId("r"),
        step=StepIndex(0),
        epoch=Epoch(epoch),
        group=None if group is None else GroupId(group),
        body=body,
    )


PREPARED = bodies.GroupPrepared(
    prompt_lease=LeaseId(1), prompt_tokens=5, vision_tokens=1, last_token=3, start_position=4
)
VISION = bodies.PolicyVisionEncoded(lease=None, weights_version=V(0))
SCORED = bodies.GroupScored(lease=LeaseId(4))
TRAINED = bodies.ResponsesTrained(lease=None)
DONE = bodies.PrefixBackpropagated()
REWARDED = bodies.GroupRewarded(rewards=(0.0, 1.0), failures=0)


def prefix(role):
    return bodies.PrefixEncoded(role=role, lease=LeaseId(2), weights_version=V(0))


def generated(iteration=0):
    return bodies.GroupGenerated(
        lease=LeaseId(3), response_tokens=4, decode_iteration=iteration, weights_version=V(0)
    )


def folded(view, *pairs):
    for body, group in pairs:
        assert view.apply(event(body, group))
    return view


def test_every_schedule_has_every_task():
    for table in TABLE.values():
        assert set(table) == set(Task)
    assert set(OWNER) == set(Task)


def test_every_condition_can_be_asked():
    view = StepView(plan(ahead=1), needs_reference=True)
    for condition in Condition:
        of_ahead = condition is Condition.AHEAD_PREPARED
        view.holds(condition, (view.ahead if of_ahead else view.groups)[GroupId(0)])


def test_update_waits_for_every_living_group_under_every_schedule():
    for schedule in Schedule:
        view = StepView(plan(schedule, groups=2), needs_reference=False)
        folded(view, (generated(), 0), (REWARDED, 0), (DONE, 0))
        assert not view.may_start(Task.UPDATE, None)
        folded(view, (bodies.GroupDropped(code="c", reason="r", sample=1), 1))
        assert view.may_start(Task.UPDATE, None)


IN_WINDOW = pytest.mark.parametrize(
    ("schedule", "in_window"),
    [("serial", False), ("disaggregated", False), ("rollplex", True), ("fused", True)],
)


@IN_WINDOW
def test_prefixes_run_in_the_window(schedule, in_window):
    view = StepView(plan(Schedule(schedule)), needs_reference=True)
    folded(view, (PREPARED, 0), (VISION, 0), (bodies.WindowOpened(), None))
    assert view.may_start(Task.POLICY_PREFIX, GroupId(0)) is in_window
    assert view.may_start(Task.REFERENCE_PREFIX, GroupId(0)) is in_window


def test_only_fused_decodes_from_the_policy_prefix():
    for schedule in Schedule:
        view = folded(StepView(plan(schedule), needs_reference=True), (PREPARED, 0), (VISION, 0))
        assert view.may_start(Task.DECODE, GroupId(0)) is (schedule is not Schedule.FUSED)
        folded(view, (prefix(ModelRole.POLICY), 0))
        assert view.may_start(Task.DECODE, GroupId(0))


def test_fused_trains_a_finished_group_while_others_decode():
    ready = [(prefix(ModelRole.POLICY), 1), (generated(), 1), (REWARDED, 1), (SCORED, 1)]
    for schedule in Schedule:
        view = folded(StepView(plan(schedule), needs_reference=True), *ready)
        assert view.may_start(Task.RESPONSE_TRAIN, GroupId(1)) is (schedule is Schedule.FUSED)


def test_disaggregated_scores_a_finished_group_while_others_decode():
    finished = [(PREPARED, 0), (generated(), 0), (VISION, 0), (prefix(ModelRole.REFERENCE), 0)]
    scoring = (Task.POLICY_VISION, Task.REFERENCE_PREFIX, Task.REFERENCE_SCORE)
    for schedule in (Schedule.SERIAL, Schedule.DISAGGREGATED):
        view = folded(StepView(plan(schedule), needs_reference=True), *finished)
        may = [view.may_start(task, GroupId(0)) for task in scoring]
        apart = schedule is Schedule.DISAGGREGATED
        assert may == [True, apart, apart]
        assert not view.may_start(Task.POLICY_PREFIX, GroupId(0))


def test_a_rollout_with_its_own_weights_waits_for_no_vision():
    decodes = {}
    for schedule in Schedule:
        view = folded(StepView(plan(schedule), needs_reference=False), (PREPARED, 0))
        decodes[schedule] = view.may_start(Task.DECODE, GroupId(0))
        assert view.may_start(Task.POLICY_VISION, GroupId(0)) is not decodes[schedule]
        evaluation = StepView(plan(schedule, mode=StepMode.EVAL), needs_reference=False)
        assert evaluation.wants(Task.POLICY_VISION) is not decodes[schedule]
    assert {schedule for schedule, first in decodes.items() if first} == OWN_WEIGHTS


def test_a_push_is_about_one_rank():
    view = StepView(plan(Schedule.DISAGGREGATED), needs_reference=False)
    place = Place(rank=1, degree=2)
    other = StepView(plan(Schedule.DISAGGREGATED), needs_reference=False, place=place)
    began, ended = (
        bodies.PushBegan(weights_version=V(1), elements=3),
        bodies.PushEnded(weights_version=V(1), size_bytes=12),
    )
    folded(view, (began, None), (ended, None))
    assert (view.push, view.pushed) == (began, ended)
    assert not other.apply(event(began))
    assert not view.finished


def test_completion_order_is_decode_iteration_then_group():
    view = StepView(plan(Schedule.FUSED), needs_reference=False)
    for group, iteration in [(2, 3), (0, 5), (1, 5)]:
        folded(view, (prefix(ModelRole.POLICY), group), (generated(iteration), group))
        folded(view, (REWARDED, group))
    ready = [g for g in view.groups if view.may_start(Task.RESPONSE_TRAIN, g)]
    assert ready == [2]
    folded(view, (DONE, 2))
    assert [g for g in view.groups if view.may_start(Task.RESPONSE_TRAIN, g)] == [0, 2]


def test_an_unrewarded_earlier_group_holds_the_order():
    view = StepView(plan(Schedule.FUSED), needs_reference=False)
    for group in (0, 1):
        folded(view, (prefix(ModelRole.POLICY), group), (generated(group), group))
    folded(view, (REWARDED, 1))
    assert not view.may_start(Task.RESPONSE_TRAIN, GroupId(1))
    folded(view, (bodies.GroupDropped(code="reward", reason="r", sample=0), 0))
    assert view.may_start(Task.RESPONSE_TRAIN, GroupId(1))


def test_serial_trains_one_group_at_a_time_in_group_order():
    view = StepView(plan(groups=2), needs_reference=False)
    for group in (0, 1):
        folded(view, (PREPARED, group), (VISION, group), (generated(1 - group), group))
        folded(view, (REWARDED, group))
    assert view.may_start(Task.POLICY_PREFIX, GroupId(0))
    assert not view.may_start(Task.POLICY_PREFIX, GroupId(1))
    folded(view, (prefix(ModelRole.POLICY), 0), (TRAINED, 0), (DONE, 0))
    assert view.may_start(Task.POLICY_PREFIX, GroupId(1))


def test_without_kl_no_reference_work():
    view = folded(StepView(plan(Schedule.FUSED), needs_reference=False), (VISION, 0))
    folded(view, (bodies.WindowOpened(), None))
    assert not view.may_start(Task.REFERENCE_PREFIX, GroupId(0))


def test_evaluation_has_no_training_tasks():
    view = StepView(plan(mode=StepMode.EVAL, groups=1), needs_reference=True)
    folded(view, (PREPARED, 0), (VISION, 0), (generated(), 0), (REWARDED, 0))
    assert view.finished
    for task in (Task.POLICY_PREFIX, Task.REFERENCE_PREFIX, Task.RESPONSE_TRAIN):
        assert not view.wants(task)


def test_other_epochs_are_ignored():
    view = StepView(plan(epoch=2), needs_reference=False)
    assert not view.apply(event(VISION, 0, epoch=1))
    assert view.groups[GroupId(0)].vision is None


def test_a_repeated_event_changes_nothing():
    view = folded(StepView(plan(), needs_reference=False), (generated(), 0))
    before = view.response_tokens
    folded(view, (generated(), 0))
    assert view.response_tokens == before == 4


def test_nothing_starts_after_an_abort():
    view = folded(StepView(plan(), needs_reference=True), (bodies.StepAborted(reason="x"), None))
    assert not any(view.may_start(t, GroupId(0)) for t in set(Task) - AHEAD - {Task.UPDATE})


@pytest.mark.parametrize("schedule", list(Schedule))
def test_prompts_are_prepared_ahead_from_the_window_on(schedule):
    view = StepView(plan(schedule, groups=2, ahead=1), needs_reference=True)
    folded(view, (PREPARED, 0), (bodies.WindowOpened(), None))
    assert not view.may_start(Task.AHEAD_PREPARE, GroupId(0))
    folded(view, (bodies.GroupDropped(code="c", reason="r", sample=1), 1))
    assert view.may_start(Task.AHEAD_PREPARE, GroupId(0))
    fresh = StepView(plan(schedule, groups=2, ahead=1), needs_reference=True)
    folded(fresh, (PREPARED, 0), (PREPARED, 1))
    assert not fresh.may_start(Task.AHEAD_PREPARE, GroupId(0))


@IN_WINDOW
def test_the_window_is_for_the_next_prompts_when_the_own_prefixes_are_done(schedule, in_window):
    late = {Task.AHEAD_VISION, Task.AHEAD_REFERENCE}
    view = StepView(plan(Schedule(schedule), groups=1, ahead=2), needs_reference=True)

    def startable():
        return {(task, group) for task in late for group in (0, 1) if view.may_start(task, group)}

    folded(view, (PREPARED, 0), (VISION, 0), (prefix(ModelRole.POLICY), 0))
    folded(view, (bodies.WindowOpened(), None))
    assert view.apply(ahead_done(Task.AHEAD_PREPARE, 1))
    assert startable() == set()
    folded(view, (prefix(ModelRole.REFERENCE), 0))
    assert startable() == ({(task, 1) for task in late} if in_window else set())
    folded(view, (bodies.WindowClosed(decode_iterations=1, response_tokens=4), None))
    assert startable() == set()


def test_an_evaluation_only_prepares_ahead():
    view = StepView(plan(mode=StepMode.EVAL, ahead=1), needs_reference=True)
    assert {task for task in AHEAD if view.wants(task)} == {Task.AHEAD_PREPARE}


def test_nothing_waits_for_work_ahead():
    view = StepView(plan(groups=1, ahead=1), needs_reference=False)
    folded(view, (generated(), 0), (REWARDED, 0), (DONE, 0))
    assert view.may_start(Task.UPDATE, None)


def test_every_weights_reader_waits_for_something_of_its_own_step():
    for table in TABLE.values():
        assert all(table[task] for task in WEIGHTS_DEPENDENT)
