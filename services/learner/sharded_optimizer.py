"""The optimizer's state of several ranks, and the one file that has it whole.

Each gives what it updates: its part of the model, or of that the share of its replica.

Shapes: Et trainable elements of this rank, n of one part's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from common.worker.optimizer_parts import MASTERS, MOMENTS
from services.learner.optimizer_file import CheckpointInvalid

if TYPE_CHECKING:
    from pathlib import Path

    from services.learner.sharding import Sharding
    from services.learner.training_state import StatePart, TrainingState

ROWS = 3
"""Masters, first and second moments."""


class ShardedOptimizer:
    """A file as `OptimizerFile` makes it, of the whole model; on the host it is held at once."""

    def __init__(self, path: Path, state: TrainingState, sharding: Sharding) -> None:
        """Args: state: of this rank; its parts are what is written and read."""
        self._path = path
        self._state = state
        self._sharding = sharding
        self._rows: torch.Tensor | None = None

    def write(self, part: StatePart) -> None:
        """Take a part's range in, on the host."""
        rows = self._host_rows()
        part.read_masters(rows[0, part.elements])
        rows[1:, part.elements].copy_(part.moments)

    def gather(self) -> None:
        """Write the file from what all ranks have taken in; every rank has to call this."""
        gathered = [self._sharding.gather(row) for row in self._host_rows()]
        whole = [row for row in gathered if row is not None]
        if whole:
            save_file({MASTERS: whole[0], MOMENTS: torch.stack(whole[1:])}, self._path)

    def read(self, part: StatePart) -> None:
        """Read a part's range of this rank from the whole file, and rebuild its compute weights.

        Raises: CheckpointInvalid if the file's tensors are of another model.
        """
        row = self._host_rows()[0]
        with safe_open(self._path, framework="pt") as file:
            part.write_masters(self._taken(file.get_tensor(MASTERS), row)[part.elements])
            for place, saved in zip(part.moments, file.get_tensor(MOMENTS), strict=True):
                place.copy_(self._taken(saved, row)[part.elements])

    def _taken(self, saved: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """This rank's [Et] of a tensor of the whole model, in `row`."""
        elements = self._sharding.whole.trainable_elements
        if tuple(saved.shape) != (elements,):
            raise CheckpointInvalid(
                f"{self._path}: a tensor has shape {list(saved.shape)}; this run's model has "
                f"{elements} trainable elements; was model.train_vision another?",
                path=str(self._path),
            )
        self._sharding.take(saved, row)
        return row

    def _host_rows(self) -> torch.Tensor:
        """[3, Et]."""
        if self._rows is None:
            elements = self._state.layout.trainable_elements
            self._rows = torch.zeros((ROWS, elements), dtype=self._state.dtype)
        return self._rows
