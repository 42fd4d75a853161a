"""`rollplex verify`."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command()(verify)


def verify(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prove on this machine that the split pass and the schedules make the same update."""
    # The proof imports torch and every service's arithmetic.
    raise typer.Exit(importlib.import_module("rollplex.verify").main(as_json=as_json))
