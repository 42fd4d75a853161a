"""`rollplex memory`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from common.errors import InvalidArgument
from rollplex.cli.options import INTERRUPTED, connect, on_terminal, print_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollplex.client import Client
    from rollplex.ledger import Ledger

REFRESH_S = 0.5
SAMPLING_S = 10.0


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command()(memory)


def memory(
    context: typer.Context,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until interrupted.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; with --watch one document a line.")
    ] = False,
    png: Annotated[
        Path | None,
        typer.Option(help="Sample 20 times a second, and draw it by tensor class into this file."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="How long --png samples. Default: 10.", min=0.0)
    ] = None,
    step: Annotated[
        bool, typer.Option("--step", help="With --png: over the next whole step of the run.")
    ] = False,
) -> None:
    """Show who holds how much of the node's memory until when."""
    if png is not None and watch:
        raise InvalidArgument("--watch and --png do not go together; --png ends after --seconds")
    if step and (png is None or seconds is not None):
        raise InvalidArgument("--step wants --png and no --seconds: it is as long as the step")
    if png is not None and png.suffix != ".png":
        raise InvalidArgument(f"--png {png}: the file's name has to end in .png")
    if png is not None and not png.absolute().parent.is_dir():
        raise InvalidArgument(f"--png {png}: there is no folder {png.absolute().parent}")

    async def main() -> None:
        async with await connect(context) as client:
            if png is not None and step:
                await _step_picture(client, png, as_json=as_json)
            elif png is not None:
                length_s = SAMPLING_S if seconds is None else seconds
                await _picture(client, png, length_s, as_json=as_json)
            elif watch:
                await _watch(client, as_json=as_json)
            else:
                _print(await client.ledger(), as_json=as_json)

    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _print(ledger: Ledger, *, as_json: bool) -> None:
    from rollplex.cli.memory_tables import print_ledger

    print_json(asdict(ledger)) if as_json else print_ledger(ledger)


async def _watch(client: Client, *, as_json: bool) -> None:
    if as_json:
        import json

        await _again(client, lambda ledger: typer.echo(json.dumps(asdict(ledger))))
    elif on_terminal():
        from rich.live import Live

        from rollplex.cli.memory_tables import ledger_tables
        from rollplex.cli.tables import open_console

        with Live(console=open_console(), auto_refresh=False, screen=True) as live:
            await _again(client, lambda ledger: live.update(ledger_tables(ledger), refresh=True))
    else:
        from rollplex.cli.memory_tables import print_ledger

        await _again(client, print_ledger)


async def _again(client: Client, show: Callable[[Ledger], object]) -> None:
    while True:
        begun_s = time.monotonic()
        show(await client.ledger())
        await asyncio.sleep(max(0.0, begun_s + REFRESH_S - time.monotonic()))


async def _picture(client: Client, png: Path, seconds: float, *, as_json: bool) -> None:
    from rollplex.report.memory import draw_memory, sample_memory

    series = await sample_memory(client.ledger, seconds=seconds)
    draw_memory(series, png)
    if as_json:
        print_json(asdict(series))
    else:
        typer.echo(f"wrote {png}: {len(series.times_s)} samples of {series.device}")


async def _step_picture(client: Client, png: Path, *, as_json: bool) -> None:
    from rollplex.report.memory import draw_memory
    from rollplex.report.step_memory import sample_step

    series, phases = await sample_step(client)
    draw_memory(series, png, step=phases)
    if as_json:
        print_json({"step": asdict(phases), "memory": asdict(series)})
    else:
        typer.echo(f"wrote {png}: step {phases.step}, {phases.end_s - phases.start_s:.2f} s")
