"""What `rollplex weights verify` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollplex.cli.tables import open_console, plain_table

if TYPE_CHECKING:
    from rollplex.weights import WeightsReport

_ABSENT = "absent"


def print_weights(report: WeightsReport) -> None:
    """Who read which weights, then every tensor that differs."""
    console = open_console()
    table = plain_table("consumer", "role", "version", "tensors", "differ")
    for one in report.read:
        different = sum(
            (found.consumer, found.role) == (one.consumer, one.role) for found in report.differences
        )
        table.add_row(
            one.consumer, one.role, str(one.version), str(len(one.checksums)), str(different)
        )
    console.print(table)
    if not report.differences:
        console.print(f"run {report.run_id}: all read the same weights")
        return
    tensors = plain_table("tensor", "role", "consumer", "version", "checksum", "expected")
    for found in report.differences:
        tensors.add_row(
            found.tensor,
            found.role,
            found.consumer,
            str(found.version),
            found.checksum or _ABSENT,
            found.expected or _ABSENT,
        )
    console.print(tensors)
