"""The ledger: who holds how many bytes until when, as rows and as a readable table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.ids import Epoch, GroupId, LeaseId, Participant, RunId
    from services.broker.events import Generation

HELD = "held"
"""State of a row whose memory is a process's own."""
TABLE_ROWS = 200
"""More are summed up in a table: it rides on refusals, and has to fit a packet."""
_HEADINGS = ("bytes", "name", "what", "producer", "state", "held by", "ends when")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One piece of memory, one reservation, or what a process holds itself."""

    name: str
    """Tensor class, storage or reservation; of held memory, its kind."""
    run_id: RunId | None
    """None: of no run, held memory."""
    lease_id: LeaseId | None
    """None: run-scoped."""
    epoch: Epoch | None
    group: GroupId | None
    device: str
    """Arena that it is counted in."""
    size_bytes: int
    producer: Participant
    waiting_for: tuple[Participant, ...]
    """Consumers that have not released yet."""
    holders: tuple[Participant, ...]
    state: str
    residency: str
    until: str
    """In words: what ends it."""
    generation: Generation | None
    """None: a reservation or held, whose memory is not the broker's."""

    @property
    def held(self) -> bool:
        """Whether it is a process's own memory, beside what is handed out."""
        return self.state == HELD


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaTotals:
    """How full one arena is."""

    device: str
    capacity_bytes: int
    used_bytes: int
    """Handed out or reserved. With `held_bytes`, the sum of the device's rows."""
    peak_bytes: int
    """Of `used_bytes`."""
    held_bytes: int
    """By allocators and contexts of processes."""
    peak_total_bytes: int
    """Of used and held together."""
    free_bytes: int
    """What could be handed out now."""

    def __str__(self) -> str:
        held = f"{self.held_bytes} held by processes, " if self.held_bytes else ""
        return (
            f"{self.capacity_bytes} bytes, {self.used_bytes} used, {held}{self.free_bytes} free, "
            f"peak {self.peak_bytes}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerView:
    """The whole ledger at one moment."""

    arenas: tuple[ArenaTotals, ...]
    """The host's first."""
    rows: tuple[LedgerRow, ...]

    @property
    def used_bytes(self) -> int:
        """Of all arenas."""
        return sum(arena.used_bytes for arena in self.arenas)

    def arena(self, device: str) -> ArenaTotals:
        """The totals of one device."""
        return next(arena for arena in self.arenas if arena.device == device)

    def table(self) -> str:
        """A line of totals for each arena, then the rows, largest first, at most `TABLE_ROWS`."""
        several = len(self.arenas) > 1
        totals = [
            f"arena {arena.device}: {arena}" if several else f"arena: {arena}"
            for arena in self.arenas
        ]
        if not self.rows:
            return "\n".join([*totals, "nothing is held"])
        ordered = sorted(self.rows, key=lambda row: (-row.size_bytes, row.name))
        ordered, smaller = ordered[:TABLE_ROWS], ordered[TABLE_ROWS:]
        lines = [_HEADINGS, *map(_cells, ordered)]
        if several:
            places = ["device", *(row.device for row in ordered)]
            lines = [(*line, place) for line, place in zip(lines, places, strict=True)]
        rest = []
        if smaller:
            rest_bytes = sum(row.size_bytes for row in smaller)
            rest = [f"and {len(smaller)} smaller ones, {rest_bytes} bytes together"]
        return "\n".join([*totals, *_columns(lines), *rest])


def _cells(row: LedgerRow) -> tuple[str, ...]:
    if row.lease_id is not None:
        group = "" if row.group is None else f" group {row.group}"
        what = f"lease {row.lease_id} epoch {row.epoch}{group}"
    else:
        what = "its own" if row.run_id is None else f"run {row.run_id}"
    return (
        str(row.size_bytes),
        row.name,
        what,
        str(row.producer),
        row.state,
        names(row.holders) or "-",
        row.until,
    )


def _columns(lines: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def names(participants: Sequence[Participant]) -> str:
    """Participants as text."""
    return ", ".join(str(participant) for participant in participants)
