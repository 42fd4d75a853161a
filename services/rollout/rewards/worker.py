"""What runs in a reward worker process: a user's function on responses. Needs no torch."""

from __future__ import annotations

import copy
import math
import numbers
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from common.service.parent_watch import die_with_parent
from services.rollout.rewards.errors import RewardFunctionInvalid
from services.rollout.rewards.functions import load_function

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_CAUSE_CHARACTERS = 300

_functions: dict[str, Callable[..., Any] | RewardFunctionInvalid] = {}
"""Loaded functions of this process, or why one could not be loaded."""


class FailureKind(StrEnum):
    """Why a reward function gave no usable value."""

    RAISED = "raised"
    """It raised an exception, or could not be loaded."""
    TIMED_OUT = "timed_out"
    """It ran longer than the time limit."""
    DIED = "died"
    """Its process ended."""
    NOT_FINITE = "not_finite"
    """It returned NaN or infinity."""
    WRONG_TYPE = "wrong_type"
    """It returned something that is not a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What one function gave for one response. Contains nothing of the response itself."""

    value: float
    """0 if it failed."""
    elapsed_s: float
    failure: FailureKind | None = None
    cause: str = ""
    """What happened, for people; empty if it did not fail."""


def initialise(functions: Sequence[str]) -> None:
    """Prepare a worker process, so that no response's time limit pays for imports.

    A function that cannot be loaded does not end the process: its evaluations fail by name.
    """
    die_with_parent()
    for name in functions:
        try:
            _functions[name] = load_function(name)
        except RewardFunctionInvalid as error:
            _functions[name] = error


def loading_errors() -> dict[str, str]:
    """The functions that this process could not load, with the message for each."""
    return {
        name: str(function)
        for name, function in _functions.items()
        if isinstance(function, RewardFunctionInvalid)
    }


def evaluate(
    name: str,
    completions: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    *,
    time_limit_s: float,
    budget_s: float,
) -> list[Evaluation]:
    """Call one loaded function on several responses; whatever it does becomes an `Evaluation`.

    Args:
        completions, rows: one of each a response; every call gets a copy of its row.
        time_limit_s: a response that takes longer has timed out, even if it came to an end.
        budget_s: no further response is begun once all together have taken so long.
    Returns: one evaluation for each of the first responses, and for at least one.
    """
    evaluations: list[Evaluation] = []
    begin_s = time.monotonic()
    for completion, row in zip(completions, rows, strict=True):
        if evaluations and time.monotonic() - begin_s > budget_s:
            break
        own_row = copy.deepcopy(dict(row))
        start_s = time.monotonic()
        value, failure, cause = _call(name, completion, own_row)
        elapsed_s = time.monotonic() - start_s
        if elapsed_s > time_limit_s:
            value, failure, cause = 0.0, FailureKind.TIMED_OUT, overrun(time_limit_s)
        evaluations.append(
            Evaluation(value=value, elapsed_s=elapsed_s, failure=failure, cause=cause)
        )
    return evaluations


def overrun(time_limit_s: float) -> str:
    """The cause of every time-out, whoever notices it."""
    return f"ran longer than time_limit_s = {time_limit_s}"


def _call(name: str, completion: str, row: dict[str, Any]) -> tuple[float, FailureKind | None, str]:
    """Value, failure and cause of one response."""
    function = _functions[name]
    if isinstance(function, RewardFunctionInvalid):
        return 0.0, FailureKind.RAISED, str(function)
    try:
        value = function(completion, row)
        if not isinstance(value, numbers.Real):
            return 0.0, FailureKind.WRONG_TYPE, f"returned {type(value).__name__}"
        number = float(value)
    except BaseException as error:  # noqa: BLE001 - a user's function may end in anything
        return 0.0, FailureKind.RAISED, _describe(error)
    if not math.isfinite(number):
        return 0.0, FailureKind.NOT_FINITE, f"returned {number}"
    return number, None, ""


def _describe(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's exception may fail to describe itself
        text = "(its message cannot be read)"
    return f"{type(error).__name__}: {text}"[:_CAUSE_CHARACTERS]
