"""The largest size that fits, by as few tries as may be.

All sizes below one that fits are taken to fit, and all above one that does not are taken not to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_STRIDE = 1 / 8
"""Of the guess: the first step away from it."""


@dataclass(slots=True, kw_only=True)
class Search:
    """From a guess outwards in doubling steps until both sides are known, then by halves.

    It ends when the largest that fits and the smallest that does not are next to each other, or
    no further apart than `resolution` allows.

    Attributes:
        least, most: the sizes between which it is, both included.
        guess: where to begin; put between the two.
        resolution: of the largest size, how far above it the next one that was tried may be.
    """

    least: int
    most: int
    guess: int
    resolution: float = 0.0
    _fits: int = field(init=False)
    _too_large: int = field(init=False)
    _tries: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ValueError(f"least = {self.least} is above most = {self.most}")
        self._fits, self._too_large = self.least - 1, self.most + 1

    @property
    def largest(self) -> int | None:
        """The largest size that is known to fit; None: none is."""
        return None if self._fits < self.least else self._fits

    @property
    def too_large(self) -> int | None:
        """The smallest size that is known not to fit; None: none is."""
        return None if self._too_large > self.most else self._too_large

    @property
    def next(self) -> int | None:
        """The size to try next; None: the largest is found."""
        if self._too_large - self._fits <= max(1, int(self.resolution * self._fits)):
            return None
        if not self._tries:
            return min(max(self.guess, self.least), self.most)
        share = self.resolution / (1 + self.resolution) or _STRIDE
        stride = max(1, int(share * self.guess)) << (self._tries - 1)
        if self._too_large > self.most:
            return min(self._fits + stride, self.most)
        if self._fits < self.least:
            return max(self._too_large - stride, self.least)
        return (self._fits + self._too_large) // 2

    def tell(self, size: int, *, fits: bool) -> None:
        """What came of a try."""
        self._tries += 1
        if fits:
            self._fits = max(self._fits, size)
        else:
            self._too_large = min(self._too_large, size)
