"""Co-run rates of decode and background work on one GPU, and the share that they call for.

`gain` is the decode rate over the decode rate alone, plus the background rate over the background
rate alone on the whole GPU: 1 is no better than taking turns.
"""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from common.config.base import ConfigError, FrozenConfig
from common.config.loading import check, load_config
from common.governor.rates import Rates
from common.step.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
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
    task: Task | None = None
    """Kind of the background work; unset: any."""

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
    """In any order; one share of one number of rows and one kind of work only once."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        keys = [(entry.task, entry.rows, entry.sms) for entry in self.entries]
        if len(set(keys)) != len(keys):
            raise ValueError("entries: task, rows and sms of two entries are the same")
        over = [entry.sms for entry in self.entries if entry.sms > self.device_sms]
        if over:
            raise ValueError(f"entries: sms = {over[0]} is over device_sms = {self.device_sms}")
        return self

    def beside(self, rows: int) -> tuple[CoRun, ...]:
        """The entries for the least number of rows that holds so many.

        Args:
            rows: at least 1; more than were measured count as the most that were.
        """
        return tuple(_bracket(self.entries, rows))

    def rates(self, task: Task, rows: int, share: int, *, total_sms: int) -> Rates:
        """What is known of a kind of work on a share, for the least number of rows as in `beside`.

        Between two measured shares, and between them and the ends, the rates go in straight lines:
        on no SM nothing is done, and on all of them decode and work take turns at best. Entries of
        the kind itself count; else those of no kind in particular; else all.

        Args:
            share: of `total_sms` SMs of the GPU at hand; shares are scaled to it.
        """
        entries = _bracket(self._entries_of(task), rows)
        measured = sorted({entry.sms for entry in entries})
        known = [(0.0, Rates(decode=1.0, background=0.0))]
        known += [(sms / self.device_sms, _mean(entries, sms)) for sms in measured]
        if measured[-1] < self.device_sms:
            known.append((1.0, Rates(decode=0.0, background=1.0)))
        wanted = share / total_sms
        for (low, below), (high, above) in itertools.pairwise(known):
            if wanted <= high:
                way = (wanted - low) / (high - low)
                return Rates.clamped(
                    decode=below.decode + way * (above.decode - below.decode),
                    background=below.background + way * (above.background - below.background),
                )
        raise AssertionError(f"a share of {share} of {total_sms} SMs")

    def shares(self, *, total_sms: int) -> tuple[int, ...]:
        """The measured shares, scaled to a GPU of so many SMs, smallest first."""
        scaled = (round(entry.sms * total_sms / self.device_sms) for entry in self.entries)
        return tuple(sorted({max(1, share) for share in scaled}))

    def _entries_of(self, task: Task) -> tuple[CoRun, ...]:
        for kind in (task, None):
            found = tuple(entry for entry in self.entries if entry.task is kind)
            if found:
                return found
        return self.entries


def _bracket(entries: Sequence[CoRun], rows: int) -> list[CoRun]:
    measured = sorted({entry.rows for entry in entries})
    bracket = next((known for known in measured if known >= rows), measured[-1])
    return [entry for entry in entries if entry.rows == bracket]


def _mean(entries: Sequence[CoRun], sms: int) -> Rates:
    here = [entry for entry in entries if entry.sms == sms]
    return Rates(
        decode=statistics.fmean(entry.decode_rate for entry in here),
        background=statistics.fmean(entry.background_rate for entry in here),
    )


def load_table(path: Path) -> CoRunTable:
    """Read a table from TOML or JSON, or from all JSON files of a folder.

    What several files of a folder have, as those of several replicas do, is their mean.

    Raises: ConfigError, also where the files of a folder are about different GPUs.
    """
    if not path.is_dir():
        return load_config(CoRunTable, path)
    tables = [load_config(CoRunTable, file) for file in sorted(path.glob("*.json"))]
    sizes = sorted({table.device_sms for table in tables})
    if len(sizes) != 1:
        raise ConfigError(
            f"tables in {path} have device_sms = {sizes}; legal is at least one table, all of "
            "them with the same"
        )
    merged = {
        "device": tables[0].device,
        "device_sms": sizes[0],
        "entries": _means(entry for table in tables for entry in table.entries),
    }
    return check(CoRunTable, merged, source=str(path))


def _means(entries: Iterable[CoRun]) -> list[CoRun]:
    """One of each task, rows and sms, in the order in which they come first."""
    found: dict[tuple[Task | None, int, int], list[CoRun]] = {}
    for entry in entries:
        found.setdefault((entry.task, entry.rows, entry.sms), []).append(entry)
    return [
        CoRun(
            task=task,
            rows=rows,
            sms=sms,
            gain=statistics.fmean(one.gain for one in alike),
            background_rate=statistics.fmean(one.background_rate for one in alike),
        )
        for (task, rows, sms), alike in found.items()
    ]


_RATES = {
    2: {40: (0.87, 0.31), 56: (0.87, 0.41), 72: (0.80, 0.47), 96: (0.70, 0.59), 112: (0.60, 0.65)},
    8: {40: (0.87, 0.31), 56: (0.82, 0.40), 72: (0.80, 0.48), 96: (0.70, 0.59), 112: (0.59, 0.64)},
    16: {40: (0.91, 0.31), 56: (0.82, 0.39), 72: (0.79, 0.48), 96: (0.68, 0.58), 112: (0.58, 0.64)},
    32: {40: (0.88, 0.32), 56: (0.81, 0.39), 72: (0.72, 0.48), 96: (0.66, 0.57), 112: (0.55, 0.62)},
    64: {40: (0.83, 0.32), 56: (0.74, 0.39), 72: (0.70, 0.49), 96: (0.60, 0.58), 112: (0.48, 0.64)},
}
"""Decode and background rates by rows and SMs: means of prefix forward, and of prefix forward and
backward, in one run of `bench.corun`."""

H200 = CoRunTable(
    device="NVIDIA H200",
    device_sms=132,
    entries=tuple(
        CoRun(rows=rows, sms=sms, gain=round(decode + background, 2), background_rate=background)
        for rows, shares in _RATES.items()
        for sms, (decode, background) in shares.items()
    ),
)
"""Prefixes of 6144 tokens of the 3B model beside its decode, whose groups share one each."""
