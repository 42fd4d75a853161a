"""What is wrong with one sample."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from common.errors import InvalidArgument


class SampleFault(StrEnum):
    """Why a sample is dropped; runs count drops by fault."""

    UNREADABLE_ROW = "unreadable_row"
    """The data set raised, or gave no mapping."""
    BAD_MESSAGES = "bad_messages"
    """``messages`` is absent or is not in the chat format."""
    NO_TEXT = "no_text"
    """No message has any text."""
    UNREADABLE_IMAGE = "unreadable_image"
    """A picture cannot be opened or processed."""
    UNREADABLE_VIDEO = "unreadable_video"
    """Frames cannot be read or processed, or fps and indices do not fit them."""
    PLACEHOLDER_MISMATCH = "placeholder_mismatch"
    """The rendered prompt has another number of placeholders than the row has pictures."""
    TOO_LONG = "too_long"
    """The expanded prompt is over the limit."""
    BAD_FIELDS = "bad_fields"
    """A field for the reward is not JSON."""
    WORKER_DIED = "worker_died"
    """The process that prepared it died, twice."""


class SampleError(InvalidArgument):
    """A sample that cannot be used; it is dropped and counted, never changed to fit.

    Attributes:
        fault: the kind.
        sample: which one, such as ``train[17]``.
        data: the counts, paths and limits of the message.
    """

    def __init__(self, fault: SampleFault, sample: str, text: str, **data: Any) -> None:
        super().__init__(f"sample {sample}: {text}", fault=fault.value, sample=sample, **data)
        self.fault = fault
        self.sample = sample
        self._text = text

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep every field across a process boundary."""
        data = {k: v for k, v in self.data.items() if k not in ("fault", "sample")}
        return _rebuild, (self.fault, self.sample, self._text, data)


def _rebuild(fault: SampleFault, sample: str, text: str, data: dict[str, Any]) -> SampleError:
    return SampleError(fault, sample, text, **data)
