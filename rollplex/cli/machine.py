"""`rollplex doctor`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from rollplex.cli.options import FAILED, print_json

_MARKS = {"ok": "ok  ", "note": "note", "lacks": "LACK"}


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command()(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what this machine has and lacks for Rollplex, and how to mend it."""
    from rollplex.doctor import Finding, examine

    findings = examine()
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            typer.echo(f"{_MARKS[finding.verdict]}  {finding.subject}: {finding.found}")
            if finding.mend:
                typer.echo(f"      {finding.mend}")
    if any(finding.verdict == Finding.LACKS for finding in findings):
        raise typer.Exit(FAILED)
