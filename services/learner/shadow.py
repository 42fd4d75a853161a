"""The host shadow: masters and moments outside the broker's lifetime, in two slots.

An update writes the slot that the durable record does not name, then the record is committed. So
whenever a process dies, the slot that the record names is whole. The slots are files of the run's
folder; what protects them is the kernel's page cache, as a process's death does not touch it.

Shapes: Et trainable elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.errors import NotFound

if TYPE_CHECKING:
    from pathlib import Path

    from common.ids import WeightsVersion
    from services.learner.training_state import TrainingState

SLOTS = 2


class HostShadow:
    """The two slots of one rank."""

    def __init__(self, folder: Path, state: TrainingState, *, rank: int) -> None:
        self._folder = folder
        self._state = state
        self._rank = rank

    def slot_name(self, version: WeightsVersion) -> str:
        """The slot that this version is written to."""
        return f"rank{self._rank}-slot{version % SLOTS}"

    def save(self, version: WeightsVersion) -> None:
        """Write masters and moments into the version's slot."""
        self._folder.mkdir(parents=True, exist_ok=True)
        slot = self._map(self.slot_name(version), create=True)
        slot[0].copy_(self._state.masters)
        slot[1:].copy_(self._state.moments)

    def restore(self, name: str) -> None:
        """Read masters and moments back and rebuild the trainable compute weights.

        Raises: NotFound if the slot is gone or has another size.
        """
        path = self._folder / name
        state = self._state
        size = 3 * state.masters.numel() * state.masters.element_size()
        if not path.is_file() or path.stat().st_size != size:
            raise NotFound(
                f"host shadow {path} is missing or is not {size} bytes; the run goes back to its "
                "newest checkpoint",
                path=str(path),
            )
        slot = self._map(name, create=False)
        state.masters.copy_(slot[0])
        state.moments.copy_(slot[1:])
        state.weights_from_masters()

    def _map(self, name: str, *, create: bool) -> torch.Tensor:
        """[3, Et]: masters, first and second moments."""
        masters = self._state.masters
        flat = torch.from_file(
            str(self._folder / name),
            shared=create,
            size=3 * masters.numel(),
            dtype=masters.dtype,
        )
        return flat.view(3, masters.numel())
