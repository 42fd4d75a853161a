"""`rollplex verify`: the split pass and the schedules, held against what they must equal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollplex.verify.report import VerifyReport, verify

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["VerifyReport", "main", "verify"]


def main(*, as_json: bool, device: str = "cpu", keep: Path | None = None) -> int:
    """Verify and print the result. Returns 0 if everything is what it must be, else 1."""
    report = asyncio.run(
        verify(device=device, keep=keep, say=lambda text: sys.stderr.write(f"{text}\n"))
    )
    if as_json:
        sys.stdout.write(report.to_json() + "\n")
    else:
        for name, value in report.values.items():
            shown = dict(value) if isinstance(value, Mapping) else {"": value}
            for part, number in shown.items():
                sys.stdout.write(f"{name}{f' of {part}' if part else ''}: {number}\n")
        for failure in report.failures:
            sys.stdout.write(f"FAILED: {failure}\n")
        if not report.failures:
            sys.stdout.write("everything is what it must be\n")
    return 1 if report.failures else 0
