"""Recorded responses of one step: kept to be replayed under another schedule.

Each replica keeps those of its groups in a file of its own.

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
        """Those of all replicas. Raises RecordingInvalid if one's cannot be read, or none is there.

        Of a group that two files have, as after a change of replicas, the first replica's counts.
        """
        first = _path(Path(folder), step, 0)
        others = sorted(first.parent.glob(f"{first.stem}.*{first.suffix}"))
        tensors: dict[str, Tensor] = {}
        for path in (first, *others) if first.exists() or not others else others:
            try:
                tensors = load_file(path) | tensors
            except (OSError, SafetensorError) as error:
                raise RecordingInvalid(
                    f"recorded responses {path} cannot be read: {error}", path=str(path)
                ) from error
        return cls(tensors, first)

    @staticmethod
    def write(
        folder: Path, step: StepIndex, groups: Sequence[FinishedGroup], *, replica: int = 0
    ) -> None:
        """Write all groups of a replica; an older recording of its step is replaced as a whole."""
        path = _path(folder, step, replica)
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


def _path(folder: Path, step: StepIndex, replica: int) -> Path:
    of_replica = f".{replica}" if replica else ""
    return folder / f"step-{step:08d}{of_replica}.safetensors"
