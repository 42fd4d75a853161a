"""Errors of rollout engines."""

from __future__ import annotations

from common.errors import FailedPrecondition, InvalidArgument, RollplexError


class EngineStateInvalid(FailedPrecondition):
    """A call that the engine's state does not allow; the message says what has to come first."""


class GroupRequestInvalid(InvalidArgument):
    """A group that the step does not have, or whose request does not fit the step."""


class NonFiniteLogits(RollplexError):
    """The model gave NaN or infinite log-probabilities.

    Attributes:
        data: `group`, `sample`, `position` (index of the token in its response), `weights_version`.
    """
