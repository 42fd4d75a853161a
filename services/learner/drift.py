"""Whether what the engine sampled is still what the trainer scores."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from common.errors import FailedPrecondition

if TYPE_CHECKING:
    from common.rl.losses import LossSums


class EngineDrifted(FailedPrecondition):
    """The engine's log-probabilities are not the trainer's; the message has both's distance.

    Attributes:
        data: `difference`, `bound`.
    """


def check_drift(sums: LossSums, bound: float | None) -> None:
    """Hold the typical difference of a group's log-probabilities against the recipe's bound.

    Args:
        sums: of one group; its mean k3 of engine and trainer is half of the squared difference.
        bound: None: the engine's passes are the trainer's own.
    Raises: EngineDrifted.
    """
    if bound is None or not sums.mismatch_tokens:
        return
    difference = math.sqrt(2 * abs(sums.mismatch_k3) / sums.mismatch_tokens)
    # not "greater than": NaN does not pass
    if not difference <= bound:
        raise EngineDrifted(
            f"log-probabilities of engine and trainer differ by {difference:.2e} (root of the mean "
            f"square); the bound is {bound:.2e} (rollout.sglang.logprob_bound)",
            difference=difference,
            bound=bound,
        )
