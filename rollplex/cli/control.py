"""`rollplex pause`, `resume`, `stop`, `checkpoint`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from rollplex.cli.options import connect

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollplex.client import Client

Result = TypeVar("Result")
RunId = Annotated[str, typer.Argument(metavar="RUN", help="Run id; `rollplex list` shows them.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    for command in (pause, resume, stop, checkpoint):
        app.command()(command)


def pause(context: typer.Context, run_id: RunId) -> None:
    """Have a run wait after its running step."""
    run = _call(context, lambda client: client.pause(run_id))
    typer.echo(f"{run.run_id}: pauses after the running step" if run.ended is None else run.state)


def resume(context: typer.Context, run_id: RunId) -> None:
    """Have a paused run go on."""
    run = _call(context, lambda client: client.resume(run_id))
    typer.echo(f"{run.run_id}: {run.state}")


def stop(
    context: typer.Context,
    run_id: RunId,
    after_step: Annotated[
        bool, typer.Option("--after-step", help="Let the running step finish first.")
    ] = False,
) -> None:
    """End a run. The running step makes no update, unless --after-step is given."""
    run = _call(context, lambda client: client.stop(run_id, after_step=after_step))
    typer.echo(f"{run.run_id}: {'stops after the running step' if after_step else 'stops'}")


def checkpoint(context: typer.Context, run_id: RunId) -> None:
    """Write a checkpoint between two steps; returns when it is committed."""
    saved = _call(context, lambda client: client.save_checkpoint(run_id))
    typer.echo(f"{saved.path}: version {saved.weights_version}")


def _call(context: typer.Context, call: Callable[[Client], Awaitable[Result]]) -> Result:
    async def main() -> Result:
        async with await connect(context) as client:
            return await call(client)

    return asyncio.run(main())
