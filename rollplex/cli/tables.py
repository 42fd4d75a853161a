"""What the commands show about runs and services."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console as RichConsole
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rollplex.models import Cluster, Run

_FILE_WIDTH = 1000


def print_runs(runs: Sequence[Run]) -> None:
    """All runs, one a line."""
    table = plain_table("run", "state", "step", "reward", "restarts", "made", "reason")
    for run in runs:
        table.add_row(
            run.run_id,
            run.state,
            f"{run.steps_done}/{run.steps_total}",
            number(run.latest.get("reward_mean")),
            str(run.restarts),
            run.created.astimezone().strftime("%Y-%m-%d %H:%M"),
            run.reason,
        )
    open_console().print(table)


def print_run(run: Run) -> None:
    """One run in full."""
    table = plain_table("what", "value")
    rows: dict[str, Any] = {
        "run": run.run_id,
        "state": run.state,
        "reason": run.reason or "-",
        "steps": f"{run.steps_done} of {run.steps_total}",
        "epoch": run.epoch,
        "restarts": run.restarts,
        "samples dropped": run.samples_dropped,
        "held-out reward before": number(run.eval_reward_before),
        "held-out reward after": number(run.eval_reward_after),
        "folder": run.run_dir,
    }
    rows |= {name: number(value) for name, value in sorted(run.latest.items())}
    for name, value in rows.items():
        table.add_row(name, str(value))
    open_console().print(table)


def print_cluster(cluster: Cluster) -> None:
    """The services of the node."""
    table = plain_table("service", "serving", "phase", "pid", "gRPC", "HTTP")
    for entry in cluster.services:
        table.add_row(
            entry.participant,
            "yes" if entry.serving else "no",
            entry.phase,
            str(entry.pid),
            entry.grpc_address,
            entry.http_address,
        )
    open_console().print(table)


def print_result(run: Run, summary: Mapping[str, Any], written: Sequence[Path]) -> None:
    """How a run went."""
    console = open_console()
    console.print(f"{run.run_id}: {run.state}" + (f" ({run.reason})" if run.reason else ""))
    before, after = summary["eval_reward_before"], summary["eval_reward_after"]
    if before is not None or after is not None:
        console.print(f"held-out reward: {number(before)} before, {number(after)} after")
    console.print(
        f"{summary['steps']} steps in {summary['wall_s']:.1f} s, schedule {summary['schedule']}, "
        f"{summary['restarts']} restarts"
    )
    if summary["prefix_overlap_fraction"] is not None:
        share = summary["prefix_overlap_fraction"]
        console.print(f"prefix work inside the decode window: {share:.0%}")
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True)


def number(value: float | None) -> str:
    """A figure for a person; `-` where there is none."""
    return "-" if value is None else f"{value:.4g}"


def open_console() -> RichConsole:
    """Where tables go: as wide as the terminal, or so wide that no line is folded."""
    console = RichConsole(highlight=False)
    # Nobody folds lines for a program that reads them.
    return console if console.is_terminal else RichConsole(highlight=False, width=_FILE_WIDTH)


def plain_table(first: str, *others: str) -> Table:
    """A table without lines. The first column names the row and is never cut."""
    table = Table(box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for column in others:
        table.add_column(column, overflow="fold")
    return table
