"""Co-run rates: how fast decode and background work go beside each other."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_RATE = 0.01
"""Measured rates are at least this: what stood still for one job still ends at some time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of one kind of background work on one share of the SMs, beside one size of decode batch."""

    decode: float
    """Rate of the decode over its rate alone."""
    background: float
    """Rate of the background work over its rate alone on the whole GPU."""

    @property
    def gain(self) -> float:
        """1 is no better than taking turns."""
        return self.decode + self.background

    @classmethod
    def clamped(cls, *, decode: float, background: float) -> Rates:
        """Rates that noise may have carried out of (0, 1]."""
        return cls(
            decode=min(1.0, max(LEAST_RATE, decode)),
            background=min(1.0, max(LEAST_RATE, background)),
        )


def bracket_of(rows: int) -> int:
    """The power of two that so many decoding sequences are counted as; `rows` is at least 1."""
    return 1 << (rows - 1).bit_length()
