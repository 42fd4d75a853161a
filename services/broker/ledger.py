"""The ledger: who holds how many bytes until when, as rows and as a readable table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.ids import Epoch, GroupId, LeaseId, Participant, RunId
    from services.broker.events import Generation

_HEADINGS = ("bytes", "name", "what", "producer", "state", "held by", "ends when")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One piece of memory, or one reservation."""

    name: str
    """Tensor class, storage or reservation."""
    run_id: RunId
    lease_id: LeaseId | None
    """None: run-scoped."""
    epoch: Epoch | None
    group: GroupId | None
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
    """None: a reservation, whose memory is not the broker's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerView:
    """The whole ledger at one moment. `used_bytes` is the sum of the rows."""

    capacity_bytes: int
    used_bytes: int
    peak_bytes: int
    rows: tuple[LedgerRow, ...]

    def table(self) -> str:
        """One line of totals, then the rows, largest first."""
        free_bytes = self.capacity_bytes - self.used_bytes
        total = (
            f"arena: {self.capacity_bytes} bytes, {self.used_bytes} used, {free_bytes} free, "
            f"peak {self.peak_bytes}"
        )
        if not self.rows:
            return f"{total}\nnothing is held"
        ordered = sorted(self.rows, key=lambda row: (-row.size_bytes, row.name))
        return "\n".join([total, *_columns([_HEADINGS, *map(_cells, ordered)])])


def _cells(row: LedgerRow) -> tuple[str, ...]:
    if row.lease_id is not None:
        group = "" if row.group is None else f" group {row.group}"
        what = f"lease {row.lease_id} epoch {row.epoch}{group}"
    else:
        what = f"run {row.run_id}"
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
