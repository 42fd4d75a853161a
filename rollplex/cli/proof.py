"""`rollplex verify`."""

from __future__ import annotations

import importlib
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command()(verify)


def verify(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Annotated[str, typer.Option(help="What to compute on: cpu or cuda.")] = "cpu",
    keep: Annotated[
        Path | None, typer.Option(help="Folder to leave runs and logs in; must be new.")
    ] = None,
) -> None:
    """Prove on this machine that the split pass and the schedules make the same update."""
    # The proof starts services and processes of its own; nothing of it is needed for --help.
    proof = importlib.import_module("rollplex.verify")
    raise typer.Exit(proof.main(as_json=as_json, device=device, keep=keep))
