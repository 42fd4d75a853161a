"""Which processes the run stands on, and how often it may be begun again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.ids import WORKERS, Incarnation, Participant

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.events.bodies import ParticipantDied
    from services.controller.config import FailurePolicy


class Liveness:
    """Tells a death that costs the run its state from old news.

    A process that was replaced before the workers were configured may be reported dead only after
    that. Its incarnation gives it away; once a step has begun, the node's order does: whatever
    comes after StepBegan happened after it.
    """

    def __init__(self) -> None:
        self._incarnations: dict[Participant, Incarnation] = {}
        self._while_configuring: dict[tuple[Participant, str], str] = {}
        self._step_seen = False

    def forget(self) -> None:
        """The workers are about to be configured anew."""
        self._incarnations.clear()
        self._while_configuring.clear()
        self._step_seen = False

    def died_while_configuring(self, body: ParticipantDied) -> None:
        """Remember it until it is known which processes were configured."""
        self._while_configuring[body.participant, body.incarnation] = body.reason

    def configured(self, incarnations: Mapping[Participant, Incarnation]) -> str:
        """These processes take part. Returns: the cause where one has died since; else empty."""
        self._incarnations = dict(incarnations)
        for (participant, incarnation), reason in self._while_configuring.items():
            if self._incarnations.get(participant) == incarnation:
                return f"{participant} died: {reason}"
        return ""

    def step_began(self) -> None:
        """StepBegan of the run was seen in the node's order."""
        self._step_seen = True

    def matters(self, body: ParticipantDied) -> bool:
        """Whether this death took state of the run with it."""
        if body.participant.service not in WORKERS:
            return False
        return self._step_seen or self._incarnations.get(body.participant) == body.incarnation


class RestartBudget:
    """Attempts in a row that committed nothing."""

    def __init__(self, policy: FailurePolicy) -> None:
        self._policy = policy
        self.spent = 0

    def spend(self) -> bool:
        """Count one more failed attempt. Returns: whether another one is allowed."""
        self.spent += 1
        return self.spent <= self._policy.max_restarts_in_a_row

    def reset(self) -> None:
        """Something was committed."""
        self.spent = 0

    @property
    def delay_s(self) -> float:
        """How long to wait before the next attempt, so that quick failures do not spin."""
        if self.spent == 0:
            return 0.0
        return min(self._policy.backoff_s * 2.0 ** (self.spent - 1), self._policy.backoff_cap_s)
