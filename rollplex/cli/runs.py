"""`rollplex run`, `list`, `status`, `watch`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollplex.cli.control import RunId  # noqa: TC001 - typer reads the annotations
from rollplex.cli.options import FAILED, INTERRUPTED, connect, on_terminal, print_json

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from rollplex.client import Client
    from rollplex.models import Run

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command()(run)
    app.command("list")(list_runs)
    app.command()(status)
    app.command()(watch)


def run(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="Recipe, TOML or the recipe.json of a run.")],
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one value; may be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; must be new.")] = None,
    resume_from: Annotated[
        Path | None, typer.Option(help="Checkpoint folder to continue from.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train. Shows progress, then the result; writes summary.json and pictures."""
    from rollplex.recipes import load_recipe

    # Wrong keys are told before anything is asked of the controller.
    loaded = load_recipe(recipe, sets=sets or ())

    async def main() -> Run:
        async with await connect(context) as client:
            made = await client.create_run(loaded, run_dir=out, resume_from=resume_from)
            return made if detach else await _follow(client, made, quiet=as_json)

    ended = _interruptible(main())
    if detach:
        print_json(_run_json(ended)) if as_json else typer.echo(ended.run_id)
        return
    _finish(ended, as_json=as_json)


def list_runs(context: typer.Context, as_json: AsJson = False) -> None:
    """Show all runs."""

    async def main() -> list[Run]:
        async with await connect(context) as client:
            return await client.list_runs()

    runs = asyncio.run(main())
    if as_json:
        print_json([_run_json(found) for found in runs])
        return
    from rollplex.cli.tables import print_runs

    print_runs(runs)


def status(
    context: typer.Context,
    run_id: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Run id; without it: the node's services.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show one run, or the services of the node."""
    from rollplex.cli.tables import print_cluster, print_run

    async def main() -> None:
        async with await connect(context) as client:
            if run_id is not None:
                found = await client.get_run(run_id)
                print_json(_run_json(found)) if as_json else print_run(found)
                return
            cluster = await client.cluster()
            services = [asdict(entry) for entry in cluster.services]
            print_json(services) if as_json else print_cluster(cluster)

    asyncio.run(main())


def watch(context: typer.Context, run_id: RunId, as_json: AsJson = False) -> None:
    """Follow a run to its end."""

    async def main() -> Run:
        async with await connect(context) as client:
            return await _follow(client, await client.get_run(run_id), quiet=as_json)

    _finish(_interruptible(main()), as_json=as_json)


async def _follow(client: Client, run: Run, *, quiet: bool) -> Run:
    from rollplex.cli.progress import Silent, open_progress

    with Silent() if quiet else open_progress(run, live=on_terminal()) as progress:
        async for update in client.watch_run(run.run_id):
            progress.show(update)
            run = update.run
    return run


def _interruptible(work: Coroutine[Any, Any, Run]) -> Run:
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        typer.echo(
            "The run goes on without you: `rollplex watch RUN` follows it again, "
            "`rollplex stop RUN` ends it.",
            err=True,
        )
        raise typer.Exit(INTERRUPTED) from None


def _finish(run: Run, *, as_json: bool) -> None:
    from rollplex.models import RunState
    from rollplex.report.summary import summarise, write_report

    summary = summarise(run)
    written = write_report(run, summary)
    if as_json:
        print_json(summary)
    else:
        from rollplex.cli.tables import print_result

        print_result(run, summary, written)
    if run.state is not RunState.SUCCEEDED:
        raise typer.Exit(FAILED)


def _run_json(run: Run) -> dict[str, object]:
    return asdict(run)
