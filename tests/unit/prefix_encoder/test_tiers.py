"""Which policy prefixes run ahead."""

from __future__ import annotations

import pytest

from common.events import bodies
from common.events.bodies import ModelRole
from common.ids import GroupId, LeaseId
from common.step.schedule import Schedule
from common.step.tasks import Task
from common.step.view import StepView
from services.prefix_encoder.tiers import worth_running
from tests.unit.step.test_schedule import event, plan

TOKENS = 60
GROUPS = 3


def view(schedule: Schedule) -> StepView:
    made = StepView(plan(schedule, groups=GROUPS), needs_reference=True)
    for group in range(GROUPS):
        prepared = bodies.GroupPrepared(
            prompt_lease=LeaseId(1),
            prompt_tokens=TOKENS + 1,
            vision_tokens=0,
            last_token=1,
            start_position=0,
        )
        assert made.apply(event(prepared, group))
    return made


def allowed(made: StepView, task: Task, *, room: bool) -> list[int]:
    asked: list[int] = []

    def keeps_graph(tokens: int) -> bool:
        asked.append(tokens)
        return room

    found = [
        group
        for group in range(GROUPS)
        if worth_running(made, (), (task, GroupId(group)), keeps_graph=keeps_graph)
    ]
    assert set(asked) <= {TOKENS}
    return found


@pytest.mark.parametrize("room", [False, True])
def test_what_is_due_runs_and_the_rest_where_its_graph_is_kept(room: bool) -> None:
    made = view(Schedule.ROLLPLEX)
    assert allowed(made, Task.POLICY_PREFIX, room=room) == ([0, 1, 2] if room else [0])
    done = [
        bodies.PrefixEncoded(role=ModelRole.POLICY, lease=LeaseId(2), weights_version=0),
        bodies.PrefixBackpropagated(),
    ]
    for body in done:
        assert made.apply(event(body, 0))
    assert allowed(made, Task.POLICY_PREFIX, room=room) == ([0, 1, 2] if room else [0, 1])


@pytest.mark.parametrize(
    ("schedule", "task"),
    [
        (Schedule.FUSED, Task.POLICY_PREFIX),
        (Schedule.ROLLPLEX, Task.REFERENCE_PREFIX),
        (Schedule.ROLLPLEX, Task.POLICY_VISION),
    ],
)
def test_everything_else_runs_without_a_graph(schedule: Schedule, task: Task) -> None:
    assert allowed(view(schedule), task, room=False) == [0, 1, 2]
