"""Errors of rollout engines."""

from __future__ import annotations

from common.errors import FailedPrecondition, InvalidArgument, RollplexError, Unavailable


class EngineStateInvalid(FailedPrecondition):
    """A call that the engine's state does not allow; the message says what has to come first."""


class GroupRequestInvalid(InvalidArgument):
    """A group that the step does not have, or whose request does not fit the step."""


class NonFiniteLogits(RollplexError):
    """The model gave NaN or infinite log-probabilities.

    Attributes:
        data: `group`, `sample`, `position` (index of the token in its response), `weights_version`.
    """


class EngineGone(Unavailable):
    """The engine's processes have ended, or were ended because they did not answer in time."""


class EngineRefused(FailedPrecondition):
    """The engine cannot do what it was asked; the message is its own."""


class VersionMismatch(RollplexError):
    """A response was sampled by other weights than the step's.

    Attributes:
        data: `group`, `sample`.
    """


class LogprobGateFailed(FailedPrecondition):
    """The engine's log-probabilities are not those of the trainer; the message has both's distance.

    Attributes:
        data: `bound`, and the largest difference of each kind of prompt.
    """
