"""The host shadow: masters and moments outside the broker's lifetime, two versions of them.

An update writes a draft, which gets its version's name when it is whole; then the durable record is
committed. So whenever a process dies, what the record names is whole or gone, and never another
version. The slots are files of the run's folder; what protects them is the kernel's page cache, as
a process's death does not touch it.

Shapes: Es elements that this rank updates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.errors import NotFound
from common.ids import WeightsVersion

if TYPE_CHECKING:
    from pathlib import Path

    from common.step.place import Place
    from services.learner.training_state import StatePart, TrainingState


class HostShadow:
    """The slots of one rank."""

    def __init__(self, folder: Path, state: TrainingState, *, place: Place) -> None:
        self._folder = folder
        self._own = state.own
        self._elements = state.own.stop - state.own.start
        self._dtype = state.dtype
        replicas = "" if place.replicas == 1 else f"x{place.replicas}"
        self._ranks = f"of{place.degree}{replicas}-"
        self._prefix = f"rank{place.rank}{self._ranks}"
        self._draft = f"{self._prefix}draft"

    def slot_name(self, version: WeightsVersion) -> str:
        """The slot of a version."""
        return f"{self._prefix}v{version}"

    def begin(self, version: WeightsVersion) -> None:
        """Prepare the draft of a version; of older ones only the one before it stays.

        The draft takes over the file of an older version: its pages are there already.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / self._draft
        kept = self._folder / self.slot_name(WeightsVersion(version - 1))
        for path in sorted(self._folder.glob("rank*of*-*")):
            if self._ranks not in path.name:
                path.unlink(missing_ok=True)  # of other ranks, in which nobody saves now
            elif not path.name.startswith(self._prefix) or path in (draft, kept):
                continue
            elif draft.exists():
                path.unlink()
            else:
                path.rename(draft)
        if draft.exists() and draft.stat().st_size != self._size_bytes:
            draft.unlink()

    def save(self, part: StatePart) -> None:
        """Write masters and moments of a part into the draft."""
        draft = self._map(self._draft, create=True)
        elements = self._place_of(part)
        part.read_masters(draft[0, elements])
        draft[1:, elements].copy_(part.moments)

    def finish(self, version: WeightsVersion) -> None:
        """The draft has all parts: it is the version's slot from now on."""
        (self._folder / self._draft).rename(self._folder / self.slot_name(version))

    def check(self, name: str) -> None:
        """Raises: NotFound if the slot is gone or has another size."""
        path = self._folder / name
        if not path.is_file() or path.stat().st_size != self._size_bytes:
            raise NotFound(
                f"host shadow {path} is missing or is not {self._size_bytes} bytes; the run goes "
                "back to its newest checkpoint",
                path=str(path),
            )

    def restore(self, name: str, part: StatePart) -> None:
        """Read a part's masters and moments back and rebuild its compute weights.

        Raises: NotFound, as `check`.
        """
        self.check(name)
        slot = self._map(name, create=False)
        elements = self._place_of(part)
        part.write_masters(slot[0, elements])
        part.moments.copy_(slot[1:, elements])

    def _place_of(self, part: StatePart) -> slice:
        return slice(part.elements.start - self._own.start, part.elements.stop - self._own.start)

    @property
    def _size_bytes(self) -> int:
        return 3 * self._elements * self._dtype.itemsize

    def _map(self, name: str, *, create: bool) -> torch.Tensor:
        """[3, Es]: masters, first and second moments."""
        flat = torch.from_file(
            str(self._folder / name), shared=create, size=3 * self._elements, dtype=self._dtype
        )
        return flat.view(3, self._elements)
