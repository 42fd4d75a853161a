"""How the rows of an axis are cut over ranks. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

Rows = tuple[int, int]
"""First row and the row after the last."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One rank's part of every axis that is cut.

    Attributes:
        rank: whose part.
        ranks: over which the axes are cut.
    """

    rank: int
    ranks: int

    def even(self, size: int) -> Rows:
        """Equal parts, rounded up; the last ranks have less where it does not divide."""
        return even_rows(size, self.ranks)[self.rank]

    def heads(self, heads: int, width: int) -> Rows:
        """Rows of whole heads; with more ranks than heads, several ranks hold the same head."""
        if heads >= self.ranks:
            first, last = self.even(heads)
        else:
            first = self.rank * heads // self.ranks
            last = first + 1
        return first * width, last * width


def even_rows(size: int, ranks: int) -> tuple[Rows, ...]:
    """Every rank's part of an axis: equal, rounded up, until nothing is left."""
    part = -(-size // ranks)
    return tuple((min(rank * part, size), min((rank + 1) * part, size)) for rank in range(ranks))


def padded_rows(size: int, ranks: int, multiple: int) -> tuple[Rows, ...]:
    """Equal parts of an axis that is padded to ``multiple * ranks``; parts may pass its end."""
    padded = -(-size // (multiple * ranks)) * multiple * ranks
    return even_rows(padded, ranks)


def following(other: tuple[Rows, ...], size: int, ranks: int) -> tuple[Rows, ...]:
    """A cut whose parts contain parts of another cut, or lie in them, where the degrees divide.

    Args:
        other: parts of the other cut; they may pass the axis' end.
        size: of the axis; no part of the result passes it.
    Returns: an even cut where neither degree divides the other.
    """
    if len(other) % ranks == 0:
        step = len(other) // ranks
        parts = [(other[at][0], other[at + step - 1][1]) for at in range(0, len(other), step)]
    elif ranks % len(other) == 0:
        parts = [
            (start + first, start + last)
            for start, stop in other
            for first, last in even_rows(stop - start, ranks // len(other))
        ]
    else:
        return even_rows(size, ranks)
    return tuple((min(start, size), min(stop, size)) for start, stop in parts)
