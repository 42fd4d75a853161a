"""`rollplex weights verify`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rollplex.cli.options import FAILED, connect, print_json

if TYPE_CHECKING:
    from rollplex.weights import WeightsReport

weights = typer.Typer(help="Weights that the processes of a run share.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    weights.command()(verify)
    app.add_typer(weights, name="weights")


def verify(
    context: typer.Context,
    run_id: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="Run id. Default: the run that is at work."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check that every process reads the same weights, bit for bit; exit code 1 if not.

    Steps go on meanwhile; an update waits until the weights are read.
    """

    async def report() -> WeightsReport:
        async with await connect(context) as client:
            return await client.verify_weights(run_id)

    found = asyncio.run(report())
    if as_json:
        print_json(
            {
                "run_id": found.run_id,
                "read": [asdict(one) for one in found.read],
                "differences": [asdict(one) for one in found.differences],
            }
        )
    else:
        from rollplex.cli.weights_tables import print_weights

        print_weights(found)
    if found.differences:
        raise typer.Exit(FAILED)
