"""The optimizer's state as a safetensors file of two whole tensors, written and read in parts.

Shapes: Et trainable elements, n of one part's.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import safe_open

from common.errors import InvalidArgument
from common.worker.optimizer_parts import MASTERS, MOMENTS

if TYPE_CHECKING:
    from pathlib import Path

    from services.learner.training_state import StatePart, TrainingState

_DTYPES = {torch.float32: ("F32", np.float32), torch.float64: ("F64", np.float64)}
_ALIGNMENT_BYTES = 8
"""Of the header's end, as the library writes it."""


class CheckpointInvalid(InvalidArgument):
    """A folder that is no committed checkpoint of this model; the message says why."""


class OptimizerFile:
    """A file `masters` [Et], `moments` [2, Et] of a training state's dtype."""

    def __init__(self, path: Path, state: TrainingState) -> None:
        """Args: state: whose; its parts are what is written and read."""
        self._path = path
        self._dtype = state.dtype
        elements = state.layout.trainable_elements
        self._shapes = {MASTERS: (elements,), MOMENTS: (2, elements)}

    def create(self) -> None:
        """Make the file, with zeros in it."""
        header = self._header()
        size_bytes = len(header) + sum(self._bytes_of(name) for name in self._shapes)
        with self._path.open("wb") as file:
            file.write(header)
            file.truncate(size_bytes)

    def write(self, part: StatePart) -> None:
        """Write a part's range of both tensors."""
        part.read_masters(self._map(MASTERS)[part.elements])
        self._map(MOMENTS)[:, part.elements].copy_(part.moments)

    def read(self, part: StatePart) -> None:
        """Read a part's range of both tensors, and rebuild its compute weights.

        Raises: CheckpointInvalid if the file's tensors have other shapes.
        """
        with safe_open(self._path, framework="pt") as file:
            saved = {name: file.get_slice(name) for name in self._shapes}
            for name, shape in self._shapes.items():
                if tuple(saved[name].get_shape()) != shape:
                    raise CheckpointInvalid(
                        f"{self._path}: {name} has shape {saved[name].get_shape()}; this run's "
                        f"model has {list(shape)}; was model.train_vision another?",
                        path=str(self._path),
                    )
            part.write_masters(saved[MASTERS][part.elements])
            part.moments.copy_(saved[MOMENTS][:, part.elements])

    def _map(self, name: str) -> torch.Tensor:
        """One tensor where it lies in the file."""
        offset = len(self._header()) + (self._bytes_of(MASTERS) if name == MOMENTS else 0)
        _, dtype = _DTYPES[self._dtype]
        pages = np.memmap(
            self._path, dtype=dtype, mode="r+", offset=offset, shape=self._shapes[name]
        )
        return torch.from_numpy(pages)

    def _header(self) -> bytes:
        """Its length and itself, as the library writes it."""
        kind, _ = _DTYPES[self._dtype]
        entries, offset = {}, 0
        for name, shape in self._shapes.items():
            end = offset + self._bytes_of(name)
            entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT_BYTES)
        return len(text).to_bytes(8, "little") + text

    def _bytes_of(self, name: str) -> int:
        return math.prod(self._shapes[name]) * self._dtype.itemsize
