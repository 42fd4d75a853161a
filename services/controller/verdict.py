"""What one event of a running step means for the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import ErrorCode, RemoteError, RollplexError
from common.events import Event, bodies
from common.step.plan import StepMode

if TYPE_CHECKING:
    from services.controller.metrics import StepObserver
    from services.controller.plans import RunSettings

FATAL_CODES = frozenset({ErrorCode.INVALID_ARGUMENT})
"""Codes of errors that the same input will always give, so that another attempt is in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The step cannot go on.

    Attributes:
        fatal: whether the run cannot either.
    """

    cause: str
    fatal: bool


def code_of(error: RollplexError) -> ErrorCode:
    """The code that an error had where it was raised."""
    return error.remote_code if isinstance(error, RemoteError) else error.code


def is_retryable(error: RollplexError) -> bool:
    """Whether the error said where it was raised that the same call may succeed later."""
    return error.remote_retryable if isinstance(error, RemoteError) else error.retryable


def is_fatal(code: ErrorCode, *, retryable: bool) -> bool:
    """Whether an error ends the run at once."""
    return not retryable and code in FATAL_CODES


def judge(
    event: Event, observer: StepObserver, settings: RunSettings, dropped_before: int
) -> Verdict | None:
    """Judge an event that the observer has folded in; None: the step goes on.

    Args:
        dropped_before: samples that the committed steps of the run dropped.
    """
    match event.body:
        case bodies.TaskFailed() as failed:
            return Verdict(
                cause=(f"{failed.task} failed in {event.sender}: {failed.type}: {failed.message}"),
                fatal=is_fatal(_parse(failed.code), retryable=failed.retryable),
            )
        case bodies.StepAborted() as aborted:
            return Verdict(
                cause=f"epoch {event.epoch} was ended by the broker: {aborted.reason}", fatal=False
            )
        case bodies.GroupDropped() as dropped if observer.view.plan.mode is StepMode.TRAIN:
            total = dropped_before + observer.dropped
            if total > settings.drops_allowed():
                return Verdict(cause=_too_many_drops(total, dropped, settings), fatal=True)
            return None
        case _:
            return None


def _too_many_drops(total: int, last: bodies.GroupDropped, settings: RunSettings) -> str:
    samples = settings.steps * settings.prompts_per_step
    return (
        f"{total} samples were dropped, more than data.max_drop_fraction = "
        f"{settings.max_drop_fraction:g} of the run's {samples}; the last one is "
        f"train sample {last.sample}: {last.code}: {last.reason}"
    )


def _parse(code: str) -> ErrorCode:
    try:
        return ErrorCode(code)
    except ValueError:
        return ErrorCode.INTERNAL
