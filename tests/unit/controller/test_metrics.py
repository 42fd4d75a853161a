"""Metrics and timeline of one step."""

from __future__ import annotations

import dataclasses

import pytest

from common.events import Event, bodies
from common.ids import (
    WORKERS,
    Epoch,
    GroupId,
    LeaseId,
    Participant,
    Service,
    StepIndex,
    WeightsVersion,
)
from common.step.partners import Partners
from common.step.place import Place
from common.step.tasks import Task
from services.controller.metrics import StepObserver, covered_ns, overlap_fraction
from services.controller.move_tally import MoveTally
from tests.unit.controller.kit import RUN, SECOND, SETTINGS, span

ENCODER = Participant(service=Service.PREFIX_ENCODER)
PLAN = SETTINGS.train_plan(RUN, StepIndex(0), Epoch(1))


def _apply(observer, body, *, group=None, work=None, at=0.0, sender=ENCODER, event_id=None):
    extra = {} if event_id is None else {"event_id": event_id}
    event = Event(
        sender=sender,
        run_id=RUN,
        step=StepIndex(0),
        epoch=Epoch(1),
        body=body,
        group=None if group is None else GroupId(group),
        work=work,
        **extra,
    )
    return observer.apply(event, int(at * SECOND))


def _encoded(role, version=0, graph_bytes=None):
    return bodies.PrefixEncoded(
        role=bodies.ModelRole(role),
        lease=LeaseId(1),
        weights_version=WeightsVersion(version),
        graph_bytes=graph_bytes,
    )


def _vision():
    return bodies.PolicyVisionEncoded(lease=None, weights_version=WeightsVersion(0))


def _generated(tokens):
    return bodies.GroupGenerated(
        lease=LeaseId(1), response_tokens=tokens, decode_iteration=1, weights_version=0
    )


def _observed() -> StepObserver:
    observer = StepObserver(PLAN, needs_reference=True)
    _apply(observer, bodies.StepBegan(plan=PLAN), at=100.0)
    _apply(observer, _vision(), group=0, work=span(Task.POLICY_VISION, 100, 101))
    _apply(observer, bodies.WindowOpened(), work=span(Task.DECODE, 100.5, 101))
    _apply(observer, _vision(), group=1, work=span(Task.POLICY_VISION, 101, 102))
    # 3 of these 4 seconds are inside the window.
    _apply(observer, _encoded("policy"), group=0, work=span(Task.POLICY_PREFIX, 102, 104))
    _apply(observer, _encoded("reference"), group=0, work=span(Task.REFERENCE_PREFIX, 104, 106))
    for group, tokens in ((0, 30), (1, 10)):
        _apply(observer, _generated(tokens), group=group)
        _apply(
            observer, bodies.GroupRewarded(rewards=(1.0, 0.0, 0.0, 0.0), failures=1), group=group
        )
    _apply(
        observer,
        bodies.WindowClosed(decode_iterations=30, response_tokens=40),
        work=span(Task.DECODE, 101, 105),
    )
    _apply(
        observer,
        bodies.WeightsPublished(weights_version=WeightsVersion(1), metrics={"grad_norm": 2.0}),
        work=span(Task.UPDATE, 108, 109),
        at=110.0,
    )
    return observer


def test_the_metrics_of_a_step():
    record = _observed().record(previous_update_end_ns=99 * SECOND)
    assert record.wall_s == 10.0
    metrics = record.metrics
    assert metrics["reward_mean"] == 0.25
    assert metrics["reward_failures"] == 2
    assert metrics["response_tokens"] == 40
    assert metrics["response_tokens_mean"] == 5.0
    assert metrics["tokens_per_s"] == 4.0
    assert metrics["window_s"] == 4.0
    assert metrics["time_admit_s"] == 0.5
    assert metrics["time_policy_prefix_s"] == 2.0
    assert metrics["time_policy_vision_s"] == 2.0
    assert metrics["prefix_overlap_fraction"] == 0.75
    assert metrics["hidden_fraction"] == pytest.approx(4 / 5)
    assert metrics["grad_norm"] == 2.0
    assert metrics["update_order_margin_s"] == 1.0


def test_work_that_ran_ahead_of_the_update_has_a_negative_margin():
    record = _observed().record(previous_update_end_ns=int(100.5 * SECOND))
    assert record.metrics["update_order_margin_s"] == -0.5


def _ahead(observer, task, start, end):
    body = bodies.AheadDone(task=task, index=GroupId(0))
    assert _apply(observer, body, work=span(task, start, end))


def test_work_ahead_counts_where_and_when_it_is_done():
    observer = _observed()
    _ahead(observer, Task.AHEAD_VISION, 102, 103)
    _ahead(observer, Task.AHEAD_REFERENCE, 103, 105)
    metrics = observer.record(None).metrics
    assert (metrics["time_ahead_vision_s"], metrics["time_ahead_reference_s"]) == (1.0, 2.0)
    assert metrics["prefix_overlap_fraction"] == pytest.approx(5 / 6)
    assert metrics["hidden_fraction"] == pytest.approx(7 / 8)
    (row,) = [row for row in observer.spans() if row.task == Task.AHEAD_VISION]
    assert row.group is None


def test_what_was_done_ahead_has_no_time_in_its_own_step():
    observer = StepObserver(PLAN, needs_reference=True)
    _apply(observer, _vision(), group=0)
    _apply(observer, bodies.WindowOpened(), at=1.0)
    _apply(observer, _vision(), group=1, work=span(Task.POLICY_VISION, 1, 2))
    _apply(observer, bodies.WindowClosed(decode_iterations=1, response_tokens=1), at=3.0)
    metrics = observer.record(None).metrics
    assert metrics["time_policy_vision_s"] == 1.0
    # It is not the vision that the window had to wait for.
    assert metrics["hidden_fraction"] == 1.0


def test_the_timeline_has_every_span_and_the_window():
    rows = _observed().spans()
    assert [row.task for row in rows] == [
        "policy_vision",
        "admit",
        "policy_vision",
        "window",
        "policy_prefix",
        "reference_prefix",
        "update",
    ]
    window = next(row for row in rows if row.task == "window")
    assert (window.start_ns, window.end_ns) == (101 * SECOND, 105 * SECOND)
    assert window.participant == "rollout/0"
    assert rows[0].to_json()["group"] == 0


def test_a_repeated_event_adds_nothing():
    observer = StepObserver(PLAN, needs_reference=True)
    work = span(Task.POLICY_VISION, 1, 2)
    assert _apply(observer, _vision(), group=0, work=work, event_id="e")
    assert not _apply(observer, _vision(), group=0, work=work, event_id="e")
    assert len(observer.spans()) == 1


def test_windows_without_spans_are_timed_by_arrival():
    observer = StepObserver(PLAN, needs_reference=True)
    _apply(observer, bodies.WindowOpened(), at=1.0)
    _apply(observer, bodies.WindowClosed(decode_iterations=1, response_tokens=1), at=3.0)
    assert observer.record(None).metrics["window_s"] == 2.0


@pytest.mark.parametrize(
    ("spans", "windows", "expected"),
    [
        ([(0, 10)], [(0, 10)], 1.0),
        ([(0, 10)], [(5, 20)], 0.5),
        ([(0, 10), (10, 20)], [(2, 4), (18, 30)], 0.2),
        ([(0, 10)], [], 0.0),
        ([(10, 20)], [(0, 5)], 0.0),
        ([], [(0, 5)], None),
        ([(3, 3)], [(0, 5)], None),
    ],
)
def test_overlap_fraction(spans, windows, expected):
    assert overlap_fraction([(0, one) for one in spans], [(0, one) for one in windows]) == expected


def test_prefixes_hide_in_windows_of_their_own_replica_alone():
    spans = [(0, (0, 10)), (1, (0, 10))]
    assert overlap_fraction(spans, [(1, (5, 10))]) == 0.25


def test_the_time_of_a_task_counts_overlapping_spans_once():
    assert covered_ns([(5, 9), (0, 3), (1, 4), (2, 3)]) == 8
    assert covered_ns([]) == 0


def test_the_mean_share_is_that_of_work_on_a_share_by_time():
    observer = _observed()
    assert "sm_share_mean" not in observer.record(None).metrics
    for start, end, sms in ((102, 103, 40), (103, 106, 80)):
        work = dataclasses.replace(span(Task.REFERENCE_SCORE, start, end), sms=sms)
        _apply(observer, bodies.GroupScored(lease=LeaseId(3)), group=0, work=work)
    metrics = observer.record(None).metrics
    assert metrics["sm_share_mean"] == 70.0
    assert metrics["time_governed_s"] == 4.0
    assert [row.sms for row in observer.spans() if row.task == "reference_score"] == [40, 80]


def test_the_slow_down_of_the_decode_is_that_beside_measured_work():
    observer = _observed()
    assert "governed_decode_slowdown" not in observer.record(None).metrics
    for start, end, rate in ((102, 103, 0.8), (103, 106, 0.4), (106, 200, 0.0)):
        work = dataclasses.replace(span(Task.REFERENCE_SCORE, start, end), decode_rate=rate)
        _apply(observer, bodies.GroupScored(lease=LeaseId(3)), group=0, work=work)
    # 4 seconds, in which the decode did what takes 2 seconds alone
    assert observer.record(None).metrics["governed_decode_slowdown"] == pytest.approx(2.0)


def test_graphs_are_counted_and_their_peak_is_of_those_that_live_together():
    observer = StepObserver(PLAN, needs_reference=True)
    _apply(observer, _encoded("policy", graph_bytes=30), group=0)
    _apply(observer, _encoded("policy", graph_bytes=50), group=1)
    _apply(observer, bodies.PrefixBackpropagated(), group=0, event_id="once")
    _apply(observer, bodies.PrefixBackpropagated(), group=0, event_id="once")
    metrics = observer.record(None).metrics
    assert (metrics["graphs_kept"], metrics["graph_bytes_peak"]) == (1, 80)
    # The graph of group 1 had to go after all.
    again = bodies.PrefixBackpropagated(recomputed=True, recompute_s=0.5)
    _apply(observer, again, group=1)
    metrics = observer.record(None).metrics
    assert (metrics["graphs_kept"], metrics["prefixes_recomputed"]) == (1, 1)
    assert metrics["time_prefix_recompute_s"] == 0.5


def test_a_dropped_groups_graph_is_gone():
    observer = StepObserver(PLAN, needs_reference=True)
    _apply(observer, _encoded("policy", graph_bytes=30), group=0)
    _apply(observer, bodies.GroupDropped(code="c", reason="r", sample=0), group=0)
    _apply(observer, _encoded("policy", graph_bytes=50), group=1)
    assert observer.record(None).metrics["graph_bytes_peak"] == 50


def _moved(
    *, restored: bool, size_bytes: int, seconds: float, storage: str = "reference.weights"
) -> bodies.ContentsMoved:
    return bodies.ContentsMoved(
        storage=storage,
        device="cpu",
        restored=restored,
        size_bytes=size_bytes,
        seconds=seconds,
    )


def test_what_left_the_device_and_came_back_is_counted_by_storage():
    observer = _observed()
    assert not [name for name in observer.record(None).metrics if "reference_weights" in name]
    _apply(observer, _moved(restored=False, size_bytes=8, seconds=0.5), event_id="a")
    _apply(observer, _moved(restored=False, size_bytes=8, seconds=0.5), event_id="a")
    _apply(observer, _moved(restored=True, size_bytes=8, seconds=0.25), event_id="b")
    _apply(observer, _moved(restored=False, size_bytes=8, seconds=0.125), event_id="c")
    metrics = observer.record(None).metrics
    assert {name: metrics[name] for name in metrics if "reference_weights" in name} == {
        "reference_weights_spilled_bytes": 16,
        "time_reference_weights_spill_s": 0.625,
        "reference_weights_restored_bytes": 8,
        "time_reference_weights_restore_s": 0.25,
    }


def test_the_parts_of_the_optimizers_state_are_one_metric():
    observer = _observed()
    for number in range(3):
        part = {"storage": f"policy.optimizer.{number}", "size_bytes": 8, "seconds": 0.5}
        _apply(observer, _moved(restored=False, **part), event_id=f"out {number}")
        _apply(observer, _moved(restored=True, **part), event_id=f"back {number}")
    metrics = observer.record(None).metrics
    assert {name: metrics[name] for name in metrics if "optimizer" in name} == {
        "policy_optimizer_spilled_bytes": 24,
        "time_policy_optimizer_spill_s": 1.5,
        "policy_optimizer_restored_bytes": 24,
        "time_policy_optimizer_restore_s": 1.5,
    }


def test_what_leaves_after_a_steps_record_is_of_the_next_one():
    def event(name, epoch):
        body = _moved(restored=False, size_bytes=8, seconds=0.5, storage="policy.optimizer.0")
        fields = {"run_id": PLAN.run_id, "step": PLAN.step, "epoch": epoch}
        return Event(sender=ENCODER, body=body, event_id=name, **fields)

    late = MoveTally(PLAN)
    following = dataclasses.replace(PLAN, epoch=Epoch(PLAN.epoch + 1))
    observer = StepObserver(following, needs_reference=True, late=late)
    for name, epoch in (("a", PLAN.epoch), ("a", PLAN.epoch), ("b", PLAN.epoch - 1)):
        late.apply(event(name, epoch))
    assert observer.apply(event("c", following.epoch), received_ns=0)
    assert observer.record(None).metrics["policy_optimizer_spilled_bytes"] == 16


def test_a_record_is_of_all_replicas():
    groups = tuple(
        dataclasses.replace(group, replica=group.group, rollout_replica=group.group)
        for group in PLAN.groups
    )
    observer = StepObserver(
        dataclasses.replace(PLAN, groups=groups),
        needs_reference=True,
        place=Place(degree=2, replicas=2),
    )
    for rank in range(4):
        sender = Participant(service=Service.ROLLOUT, rank=rank)
        at = 10 * rank
        work = span(Task.DECODE, at, at + 1)
        _apply(observer, bodies.WindowOpened(), work=work, sender=sender)
        work = span(Task.POLICY_PREFIX, at + 2, at + 6)
        _apply(observer, _encoded("policy"), group=rank // 2, work=work, sender=sender)
        _apply(observer, _generated(5 + rank), group=rank // 2, sender=sender)
        closed = bodies.WindowClosed(decode_iterations=1, response_tokens=1)
        work = span(Task.DECODE, at + 1, at + 4)
        _apply(observer, closed, work=work, sender=sender)
    metrics = observer.record(None).metrics
    assert metrics["response_tokens"] == 5 + 7
    assert metrics["window_s"] == 6.0
    assert metrics["prefix_overlap_fraction"] == 0.5
    windows = [row for row in observer.spans() if row.task == "window"]
    assert [row.participant for row in windows] == ["rollout/0", "rollout/2"]


def rollouts(training, number):
    """One rank in each replica."""
    return Partners(
        dict.fromkeys(WORKERS, 1), dict.fromkeys(WORKERS, training) | {Service.ROLLOUT: number}
    )


@pytest.mark.parametrize("replicas", [(1, 2), (2, 1)], ids=str)
def test_work_is_hidden_in_any_window_of_its_family_and_only_once(replicas):
    """Seconds: windows 10 to 14 and 12 to 16, or one of both; a prefix from 11 to 17."""
    training, number = replicas
    partners = rollouts(training, number)
    groups = tuple(
        dataclasses.replace(
            group,
            replica=partners.bound(group.group, Service.LEARNER),
            rollout_replica=partners.bound(group.group, Service.ROLLOUT),
        )
        for group in PLAN.groups
    )
    observer = StepObserver(
        dataclasses.replace(PLAN, groups=groups),
        needs_reference=False,
        place=Place(replicas=training),
        partners=partners,
    )
    edges = [(10, 14), (12, 16)] if number == 2 else [(10, 16)]
    for rank, (opened, closed) in enumerate(edges):
        sender = Participant(service=Service.ROLLOUT, rank=rank)
        work = span(Task.DECODE, opened - 1, opened)
        assert _apply(observer, bodies.WindowOpened(), work=work, sender=sender)
        body = bodies.WindowClosed(decode_iterations=1, response_tokens=1)
        assert _apply(observer, body, work=span(Task.DECODE, opened, closed), sender=sender)
    sender = Participant(service=Service.PREFIX_ENCODER, rank=training - 1)
    group, work = training - 1, span(Task.POLICY_PREFIX, 11, 17)
    assert _apply(observer, _encoded("policy"), group=group, work=work, sender=sender)
    metrics = observer.record(None).metrics
    assert metrics["prefix_overlap_fraction"] == pytest.approx(5 / 6)
    assert metrics["window_s"] == 6.0


def test_the_first_picture_of_a_family_alone_cannot_hide():
    """Another replica of the rollout decodes meanwhile."""
    partners = rollouts(1, 2)
    groups = tuple(
        dataclasses.replace(group, rollout_replica=partners.bound(group.group, Service.ROLLOUT))
        for group in PLAN.groups
    )
    observer = StepObserver(
        dataclasses.replace(PLAN, groups=groups), needs_reference=False, partners=partners
    )
    for group, start in ((0, 5), (1, 6)):
        work = span(Task.POLICY_VISION, start, start + 1)
        assert _apply(observer, _vision(), group=group, work=work)
    opened = span(Task.DECODE, 6, 6)
    sender = Participant(service=Service.ROLLOUT)
    assert _apply(observer, bodies.WindowOpened(), work=opened, sender=sender)
    body = bodies.WindowClosed(decode_iterations=1, response_tokens=1)
    assert _apply(observer, body, work=span(Task.DECODE, 6, 9), sender=sender)
    assert observer.record(None).metrics["hidden_fraction"] == 1.0
