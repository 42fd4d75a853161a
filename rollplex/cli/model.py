"""`rollplex init-model`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("init-model")(init_model)


def init_model(
    spec: Annotated[Path, typer.Argument(help="Model specification, TOML.")],
    target: Annotated[Path, typer.Argument(help="Folder to make.")],
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one value; may be repeated."),
    ] = None,
) -> None:
    """Make a small model with random weights, in Hugging Face format."""
    from common.vlm.initialise import initialise, load_spec

    report = initialise(load_spec(spec, sets=sets or ()), target)
    typer.echo(
        f"{report.path}: {report.parameters:,} parameters, {report.vocab_tokens} tokens, "
        f"{len(report.files)} files"
    )
