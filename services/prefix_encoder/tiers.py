"""Which policy prefixes run ahead of their training: those that save something by it.

A prefix that runs ahead and keeps its graph saves a forward beside the decode. Without the graph
the forward runs again for the backward, and what it cost in the window was for nothing; so it runs
when its group is due, or once there is memory for its graph. Where the rollout decodes from the
prefix, it runs in any case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.step.schedule import PREFILL_FROM_LEASE
from common.step.tasks import Task
from services.prefix_encoder.admission import Leases, due_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from common.step.machine import Subject
    from common.step.view import StepView


def worth_running(
    view: StepView,
    started: Collection[Subject],
    wanted: Subject,
    *,
    keeps_graph: Callable[[int], bool],
) -> bool:
    """Whether a task that may start is to start now.

    Args:
        started: what this process has started in this epoch.
        keeps_graph: whether the next policy prefix, of so many tokens, would keep its graph.
    """
    task, group = wanted
    if task is not Task.POLICY_PREFIX or view.plan.schedule in PREFILL_FROM_LEASE:
        return True
    assert group is not None
    state = view.groups[group]
    assert state.prepared is not None
    if due_policy(Leases(view, started), state):
        return True
    return keeps_graph(state.prepared.prompt_tokens - 1)
