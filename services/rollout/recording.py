"""Recorded responses of one step: kept to be replayed under another schedule.

Shapes: T tokens of a group's packed responses, G responses.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common.errors import InvalidArgument
from services.rollout.engines.protocol import FinishedGroup, RecordedResponses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from common.ids import GroupId, StepIndex


class RecordingInvalid(InvalidArgument):
    """Recorded responses that are missing or do not fit the step; the message names the file."""


class Recording:
    """The responses of one step, by group."""

    def __init__(self, tensors: dict[str, Tensor], path: Path) -> None:
        self._tensors = tensors
        self._path = path

    @classmethod
    def read(cls, folder: Path | str, step: StepIndex) -> Recording:
        """Raises RecordingInvalid if the folder has no readable recording of the step."""
        path = _path(Path(folder), step)
        try:
            return cls(load_file(path), path)
        except (OSError, SafetensorError) as error:
            raise RecordingInvalid(
                f"recorded responses {path} cannot be read: {error}", path=str(path)
            ) from error

    @staticmethod
    def write(folder: Path, step: StepIndex, groups: Sequence[FinishedGroup]) -> None:
        """Write all groups of a step; an older recording of it is replaced as a whole."""
        path = _path(folder, step)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {f"{g.group}.tokens": g.tokens for g in groups}
        tensors |= {f"{g.group}.lengths": g.lengths for g in groups}
        draft = path.with_suffix(".tmp")
        save_file(tensors, draft)
        draft.replace(path)

    def responses(self, group: GroupId) -> RecordedResponses:
        """Raises RecordingInvalid for a group that was not recorded."""
        try:
            return RecordedResponses(
                tokens=self._tensors[f"{group}.tokens"], lengths=self._tensors[f"{group}.lengths"]
            )
        except KeyError as error:
            raise RecordingInvalid(f"{self._path} has no responses of group {group}") from error


def _path(folder: Path, step: StepIndex) -> Path:
    return folder / f"step-{step:08d}.safetensors"
