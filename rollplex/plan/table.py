"""Tensor classes, phases, and the bytes of one class in one phase."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Phase(StrEnum):
    """A part of a step; each shows its own largest moment."""

    VISION = "vision"
    """The policy's tower runs for all groups."""
    PREFILL = "prefill"
    """The first prefixes are made for the rollout."""
    WINDOW = "window"
    """Sequences decode."""
    REFERENCE = "reference"
    """Responses are scored after the window."""
    TRAINING = "training"
    """Response and prefix backward after the window."""
    UPDATE = "update"
    """Optimizer step and new weights."""


class TensorClass(StrEnum):
    """Rows of the table."""

    POLICY = "policy weights"
    ROLLOUT = "rollout copy of the weights"
    REFERENCE = "reference weights"
    ACCUMULATOR = "gradient accumulator"
    MASTERS = "master weights"
    MOMENTS = "moments"
    POOL_PREFIX = "rollout K/V, prefixes"
    POOL_PRIVATE = "rollout K/V, responses"
    POLICY_KV = "policy prefix K/V"
    REFERENCE_KV = "reference prefix K/V"
    KV_GRADIENTS = "gradients of prefix K/V"
    GRAPHS = "prefix graphs"
    VISION_GRAPHS = "vision graphs"
    RESPONSES = "response activations"
    VISION = "pixels, vision embeddings"
    LOGITS = "logits"
    WORK = "workspaces"
    RESERVE = "contexts, CUDA graphs, libraries"


ALL_PHASES = tuple(Phase)


@dataclass(slots=True)
class Table:
    """Bytes a GPU; what was never put is 0."""

    cells: dict[TensorClass, dict[Phase, int]] = field(default_factory=dict)

    def put(self, row: TensorClass, size_bytes: int, phases: Iterable[Phase] = ALL_PHASES) -> None:
        """Set a class's bytes in some phases."""
        cells = self.cells.setdefault(row, dict.fromkeys(Phase, 0))
        cells.update(dict.fromkeys(phases, size_bytes))

    def get(self, row: TensorClass, phase: Phase) -> int:
        """Bytes of one class in one phase."""
        return self.cells.get(row, {}).get(phase, 0)

    def total(self, phase: Phase) -> int:
        """Bytes of all classes in one phase."""
        return sum(cells[phase] for cells in self.cells.values())

    @property
    def peak_phase(self) -> Phase:
        """The phase with the most bytes."""
        return max(Phase, key=self.total)

    @property
    def peak(self) -> int:
        """Most bytes of any phase."""
        return self.total(self.peak_phase)

    def rows(self) -> list[TensorClass]:
        """Classes that have bytes in some phase, in the order of `TensorClass`."""
        return [row for row in TensorClass if any(self.cells.get(row, {}).values())]
