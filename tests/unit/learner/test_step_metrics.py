"""The numbers of a step, from whatever its groups came to."""

from __future__ import annotations

import math

import pytest

from common.events import bodies
from common.ids import LeaseId
from common.rl.losses import LossSums
from common.rl.optimizer import UpdateReport
from common.step.place import Place
from common.step.schedule import Schedule
from common.step.tasks import Task
from common.step.view import StepView
from services.learner.step_metrics import step_metrics
from tests.unit.step.test_replicas import said, shared
from tests.unit.step.test_schedule import DONE, folded, generated, plan

DROPPED = bodies.GroupDropped(code="reward", reason="all failed", sample=0)


def trained(sums, lease=None):
    return bodies.ResponsesTrained(lease=lease, metrics=sums.as_dict())


def rewarded(*rewards):
    return bodies.GroupRewarded(rewards=rewards, failures=0)


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("generates", [False, True])
def test_a_step_whose_groups_are_all_dropped_updates_nothing(schedule, generates):
    view = StepView(plan(schedule), needs_reference=True)
    for group in range(3):
        assert not view.may_start(Task.UPDATE, None)
        if generates:
            folded(view, (generated(), group))
        folded(view, (DROPPED, group))
    assert view.may_start(Task.UPDATE, None)
    assert view.response_tokens == 0
    metrics = step_metrics(view, None)
    assert all(math.isfinite(value) for value in metrics.values())
    assert (metrics["groups"], metrics["groups_dropped"]) == (0.0, 3.0)
    assert metrics["update_applied"] == metrics["reward_mean"] == metrics["response_tokens"] == 0.0


def test_groups_without_gradient_dilute_the_loss_only():
    measured = LossSums(
        tokens=4.0, measured_tokens=4.0, loss=8.0, entropy=6.0, ratio=4.0, mismatch_tokens=4.0
    )
    view = folded(
        StepView(plan(), needs_reference=False),
        *[(generated(), group) for group in range(3)],
        (rewarded(1.0, 1.0), 0),
        (rewarded(1.0, 0.0), 1),
        (DROPPED, 2),
        (trained(LossSums(tokens=4.0)), 0),
        (trained(measured, LeaseId(9)), 1),
        (DONE, 1),
    )
    report = UpdateReport(applied=True, gradient_norm=2.0, clipped=True, learning_rate=0.1)
    metrics = step_metrics(view, report)
    assert metrics["loss"] == 1.0
    assert metrics["entropy"] == 1.5
    assert metrics["ratio_mean"] == 1.0
    assert metrics["measured_share"] == 0.5
    assert metrics["reward_mean"] == 0.75
    assert metrics["response_tokens"] == 8.0
    assert metrics["groups_without_gradient"] == 1.0
    assert metrics["gradient_norm"] == 2.0


@pytest.mark.parametrize("rank", [0, 1])
def test_the_numbers_are_of_all_replicas(rank):
    place = Place(rank=rank, replicas=2)
    view = StepView(shared(groups=3), needs_reference=False, place=place)
    sums = LossSums(tokens=4.0, measured_tokens=4.0, loss=8.0)
    for group in range(2):
        for body in (generated(), trained(sums, LeaseId(9)), rewarded(float(group)), DONE):
            view.apply(said(body, group, rank=group))
    view.apply(said(DROPPED, 2))
    metrics = step_metrics(view, None)
    assert (metrics["groups"], metrics["groups_dropped"]) == (2.0, 1.0)
    assert metrics["response_tokens"] == 8.0
    assert metrics["reward_mean"] == 0.5
    assert metrics["loss"] == 2.0
