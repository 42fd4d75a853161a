"""What runs in a reward worker process: a user's function on one response. Needs no torch."""

from __future__ import annotations

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
    """It ran longer than the time limit and was killed."""
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


def evaluate(name: str, completion: str, row: Mapping[str, Any]) -> Evaluation:
    """Call one loaded function on one response; whatever it does becomes an `Evaluation`."""
    function = _functions[name]
    start_s = time.monotonic()
    if isinstance(function, RewardFunctionInvalid):
        return _failed(FailureKind.RAISED, str(function), start_s)
    try:
        value = function(completion, dict(row))
    except BaseException as error:  # noqa: BLE001 - a user's function may end in anything
        cause = f"{type(error).__name__}: {error}"[:_CAUSE_CHARACTERS]
        return _failed(FailureKind.RAISED, cause, start_s)
    if not isinstance(value, numbers.Real):
        return _failed(FailureKind.WRONG_TYPE, f"returned {type(value).__name__}", start_s)
    if not math.isfinite(value):
        return _failed(FailureKind.NOT_FINITE, f"returned {float(value)}", start_s)
    return Evaluation(value=float(value), elapsed_s=time.monotonic() - start_s)


def _failed(kind: FailureKind, cause: str, start_s: float) -> Evaluation:
    return Evaluation(value=0.0, elapsed_s=time.monotonic() - start_s, failure=kind, cause=cause)
