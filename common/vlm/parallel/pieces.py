"""A rank's part of a parameter, cut so that ranks of another degree hold each piece or none of it.

So whoever reads the same parameter at whatever degree can be compared, piece by piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.layouts.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from common.vlm.parallel.shards import Shard


@dataclass(frozen=True, slots=True)
class Piece:
    """Attributes: box: in the whole parameter. inside: of the rank's tensor."""

    whole: bool
    box: Box
    inside: tuple[slice, ...]

    def named(self, parameter: str) -> str:
        """The parameter's name, with the piece's indices where it is not all of it."""
        if self.whole:
            return parameter
        return f"{parameter}[{', '.join(f'{start}:{stop}' for start, stop in self.box.ranges)}]"

    def of(self, tensor: Tensor) -> Tensor:
        """A view of the rank's tensor."""
        return tensor[self.inside]


def pieces(own: Shard, others: Iterable[Shard]) -> Iterator[Piece]:
    """What a rank holds of a parameter.

    Args: others: what each rank of the other degree holds of it; all of it together.
    """
    cuts = dict.fromkeys(box for other in others for box in other.boxes)
    row = 0
    for box in own.boxes:
        origins = [start for start, _ in box.ranges]
        for cut in cuts:
            if (both := box.intersect(cut)) is None:
                continue
            shifts = [row - origins[0], *(-origin for origin in origins[1:])]
            inside = tuple(
                slice(start + shift, stop + shift)
                for (start, stop), shift in zip(both.ranges, shifts, strict=True)
            )
            yield Piece(both == Box.whole(own.whole), both, inside)
        row += box.shape[0]
