"""The numbers of one finished step."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from common.rl.losses import LossSums

if TYPE_CHECKING:
    from common.rl.optimizer import UpdateReport
    from common.step.view import StepView


def step_metrics(view: StepView, update: UpdateReport | None) -> dict[str, float]:
    """Means over the step's tokens and responses, and what became of the update.

    Args:
        view: all living groups are trained.
        update: None if no group had a gradient.
    """
    trained = [group for group in view.living_everywhere if group.trained is not None]
    metrics = LossSums.merge(
        LossSums.from_dict(group.trained.metrics) for group in trained if group.trained
    ).means()
    rewards = [r for group in trained if group.rewarded for r in group.rewarded.rewards]
    responses = max(len(rewards), 1)
    metrics |= {
        "reward_mean": statistics.fmean(rewards) if rewards else 0.0,
        "reward_std": statistics.pstdev(rewards) if rewards else 0.0,
        "response_tokens": float(view.response_tokens),
        "response_tokens_mean": view.response_tokens / responses,
        "groups": float(len(trained)),
        "groups_without_gradient": float(
            sum(1 for g in trained if g.trained and g.trained.lease is None)
        ),
        "groups_dropped": float(len(view.everyone) - len(view.living_everywhere)),
        "update_applied": float(update is not None and update.applied),
        "gradient_norm": update.gradient_norm if update else 0.0,
        "learning_rate": update.learning_rate if update else 0.0,
    }
    return metrics
