"""What `rollplex memory` shows of a ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group

from rollplex.cli.tables import open_console, plain_table

if TYPE_CHECKING:
    from rich.table import Table

    from rollplex.ledger import EntryGroup, Ledger

_UNITS = ("B", "KiB", "MiB", "GiB")
_ENDS = 2
"""How many different ends of one group are named."""


def print_ledger(ledger: Ledger) -> None:
    """The ledger as it is now."""
    open_console().print(ledger_tables(ledger))


def ledger_tables(ledger: Ledger) -> Group:
    """Totals by device, then what they are made of."""
    return Group(_totals(ledger), "", _entries(ledger))


def size(value_bytes: int) -> str:
    """Bytes for a person."""
    value, unit = float(value_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.2f} {_UNITS[unit]}"


def _totals(ledger: Ledger) -> Table:
    table = plain_table("device", "budget", "handed out", "held", "free", "peak", "peak with held")
    for arena in ledger.arenas:
        table.add_row(
            arena.device,
            size(arena.capacity_bytes),
            size(arena.used_bytes),
            size(arena.held_bytes),
            size(arena.free_bytes),
            size(arena.peak_bytes),
            size(arena.peak_total_bytes),
        )
    return table


def _entries(ledger: Ledger) -> Table:
    table = plain_table(
        "name", "count", "size", "device", "state", "residency", "held by", "ends when"
    )
    for group in ledger.groups():
        first = group.first
        table.add_row(
            first.class_name,
            str(len(group.entries)),
            size(group.size_bytes),
            first.device,
            first.state,
            first.residency,
            ", ".join(group.holders) or "-",
            _until(group),
        )
    return table


def _until(group: EntryGroup) -> str:
    ends = group.until
    more = len(ends) - _ENDS
    return "; ".join(ends[:_ENDS]) + (f"; and {more} more" if more > 0 else "")
