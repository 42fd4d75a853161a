"""Co-run rates of decode and background work on one GPU, and the share that they call for.

`gain` is the decode rate over the decode rate alone, plus the background rate over the background
rate alone on the whole GPU: 1 is no better than taking turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from common.config.base import FrozenConfig
from common.config.loading import load_config

if TYPE_CHECKING:
    from pathlib import Path


class CoRun(FrozenConfig):
    """One measurement."""

    rows: int = Field(ge=1)
    """Sequences that decoded."""
    sms: int = Field(ge=1)
    """SMs that the background work could fill."""
    gain: float = Field(gt=0)
    """See the module's text."""
    background_rate: float = Field(gt=0, le=1)
    """Rate of the background work on so many SMs over its rate on all of them."""

    @model_validator(mode="after")
    def _decode_goes_on(self) -> Self:
        if self.gain <= self.background_rate:
            raise ValueError(
                f"gain = {self.gain} with background_rate = {self.background_rate}: the decode "
                "would stand still; legal is a gain above the background rate"
            )
        return self

    @property
    def decode_rate(self) -> float:
        """Rate of the decode over its rate alone."""
        return self.gain - self.background_rate


class CoRunTable(FrozenConfig):
    """What was measured on one kind of GPU."""

    device: str
    """Name of the GPU, for people."""
    device_sms: int = Field(ge=1)
    """SMs of that GPU."""
    entries: tuple[CoRun, ...] = Field(min_length=1)
    """In any order; one share of one number of rows only once."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        keys = [(entry.rows, entry.sms) for entry in self.entries]
        if len(set(keys)) != len(keys):
            raise ValueError("entries: a pair of rows and sms is there twice")
        over = [entry.sms for entry in self.entries if entry.sms > self.device_sms]
        if over:
            raise ValueError(f"entries: sms = {over[0]} is over device_sms = {self.device_sms}")
        return self

    def best(self, rows: int) -> CoRun:
        """The entry of the greatest gain for the least number of rows that holds so many.

        Args:
            rows: at least 1; more than were measured count as the most that were.
        """
        measured = sorted({entry.rows for entry in self.entries})
        bracket = next((known for known in measured if known >= rows), measured[-1])
        fitting = [entry for entry in self.entries if entry.rows == bracket]
        return max(fitting, key=lambda entry: (entry.gain, -entry.sms))

    def share_for(self, rows: int, *, total_sms: int) -> int:
        """SMs for background work beside so many decoding sequences; 0 sequences: all of them.

        Args:
            total_sms: of the GPU at hand; shares are scaled to it.
        """
        if rows <= 0:
            return total_sms
        share = round(self.best(rows).sms * total_sms / self.device_sms)
        return max(1, min(total_sms, share))

    def shares(self, *, total_sms: int) -> tuple[int, ...]:
        """Every share that `share_for` can call for, smallest first, the whole GPU included."""
        rows = {entry.rows for entry in self.entries}
        return tuple(sorted({self.share_for(r, total_sms=total_sms) for r in (0, *rows)}))


def load_table(path: Path) -> CoRunTable:
    """Read a table from TOML or JSON. Raises ConfigError."""
    return load_config(CoRunTable, path)


_RATES = {46: 0.45, 66: 0.59, 92: 0.79}
"""Prefix forward of Qwen2.5-VL-3B alone on so many of 132 SMs."""
_GAINS = {
    8: {46: 1.26, 66: 1.38, 92: 1.34},
    64: {46: 1.15, 66: 1.23, 92: 1.20},
    256: {46: 1.00, 66: 1.07, 92: 1.04},
}

H200 = CoRunTable(
    device="NVIDIA H200",
    device_sms=132,
    entries=tuple(
        CoRun(rows=rows, sms=sms, gain=gain, background_rate=_RATES[sms])
        for rows, gains in _GAINS.items()
        for sms, gain in gains.items()
    ),
)
"""Prefixes of 6144 tokens encoded beside a decode of groups that share one each."""
