"""The host shadow: masters and moments outside the broker's lifetime, in two slots.

An update writes the slot that the durable record does not name, part by part, then the record is
committed. So whenever a process dies, the slot that the record names is whole. The slots are files
of the run's folder; what protects them is the kernel's page cache, as a process's death does not
touch it.

Shapes: Et trainable elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.errors import NotFound

if TYPE_CHECKING:
    from pathlib import Path

    from common.ids import WeightsVersion
    from services.learner.training_state import StatePart, TrainingState

SLOTS = 2


class HostShadow:
    """The two slots of one rank."""

    def __init__(self, folder: Path, state: TrainingState, *, rank: int) -> None:
        self._folder = folder
        self._elements = state.layout.trainable_elements
        self._dtype = state.dtype
        self._rank = rank

    def slot_name(self, version: WeightsVersion) -> str:
        """The slot that this version is written to."""
        return f"rank{self._rank}-slot{version % SLOTS}"

    def save(self, version: WeightsVersion, part: StatePart) -> None:
        """Write masters and moments of a part into the version's slot."""
        self._folder.mkdir(parents=True, exist_ok=True)
        slot = self._map(self.slot_name(version), create=True)
        slot[0, part.elements].copy_(part.masters)
        slot[1:, part.elements].copy_(part.moments)

    def check(self, name: str) -> None:
        """Raises: NotFound if the slot is gone or has another size."""
        path = self._folder / name
        size = 3 * self._elements * self._dtype.itemsize
        if not path.is_file() or path.stat().st_size != size:
            raise NotFound(
                f"host shadow {path} is missing or is not {size} bytes; the run goes back to its "
                "newest checkpoint",
                path=str(path),
            )

    def restore(self, name: str, part: StatePart) -> None:
        """Read a part's masters and moments back and rebuild its compute weights.

        Raises: NotFound, as `check`.
        """
        self.check(name)
        slot = self._map(name, create=False)
        part.masters.copy_(slot[0, part.elements])
        part.moments.copy_(slot[1:, part.elements])
        part.cast()

    def _map(self, name: str, *, create: bool) -> torch.Tensor:
        """[3, Et]: masters, first and second moments."""
        flat = torch.from_file(
            str(self._folder / name), shared=create, size=3 * self._elements, dtype=self._dtype
        )
        return flat.view(3, self._elements)
