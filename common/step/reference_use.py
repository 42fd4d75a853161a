"""When the reference's weights have to be on their device.

A function of the step's events, so that all processes that read them want them, and let them go,
at the same events. Between two such times their device memory is for others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.step.schedule import TABLE, Condition
from common.step.tasks import Task

if TYPE_CHECKING:
    from common.step.view import StepView

LAST_SHARE = 4
"""One in so many groups are the last of a rollout: weights that are used after it come back beside
them."""


def reference_weights_needed(view: StepView) -> bool:
    """Whether a reference prefix or a score may run now, or soon.

    Until every group is scored and no work ahead may begin. From the step's beginning where
    reference prefixes run in the window, else from the last groups of the rollout on. Never in a
    step that scores nothing.
    """
    if not view.wants(Task.REFERENCE_PREFIX) or (view.reference_over and not view.window_open):
        return False
    if Condition.ROLLOUT_OVER not in TABLE[view.plan.schedule][Task.REFERENCE_PREFIX]:
        return True
    left = sum(not group.rolled_out for group in view.rolled)
    return left <= max(1, len(view.rolled) // LAST_SHARE)
