"""Errors of reward functions."""

from __future__ import annotations

from common.errors import ErrorCode, InvalidArgument, RollplexError


class RewardFunctionInvalid(InvalidArgument):
    """A reward function that cannot be loaded or called; the message names it and the cause."""


class RewardFailed(RollplexError):
    """A reward function failed where the recipe says that the run stops.

    Attributes:
        data: `function`, `group`, `sample` (index of the response in the group), `kind`, `cause`.
    """

    code = ErrorCode.FAILED_PRECONDITION
