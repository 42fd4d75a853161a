"""`python -m deploy.local up|down|status|logs`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from common.config.base import ConfigError
from common.config.deployment import Deployment, load_deployment
from common.errors import RollplexError
from common.service.arguments import add_config_arguments
from deploy.local.logs import follow, tail
from deploy.local.node import SERVING, Row, status, up
from deploy.local.programs import programs, supervisor_log
from deploy.local.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_LINES = 100
_PIPE_WIDTH = 200


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0; 1 when it failed or something is not serving; 2 for bad input."""
    arguments = _parser().parse_args(argv)
    try:
        deployment = load_deployment(arguments.config, arguments.sets)
        return int(arguments.command(deployment, arguments))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except RollplexError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.local", description=__doc__)
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: object, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        add_config_arguments(added)
        added.set_defaults(command=run)
        return added

    command("up", _up, "Start all services and wait until they are serving.")
    command("down", _down, "End all services that `up` started.")
    command("status", _status, "Show the services, their health and their restarts.")
    logs = command("logs", _logs, "Show log files.")
    logs.add_argument("service", nargs="?", help="such as learner, learner/0, redis, supervisord")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with what is added")
    logs.add_argument("-n", "--lines", type=int, default=_LINES, help="last lines of each file")
    return parser


def _up(deployment: Deployment, _: argparse.Namespace) -> int:
    _show(up(deployment))
    sys.stdout.write(f"controller: {deployment.controller_address}\n")
    return 0


def _down(deployment: Deployment, _: argparse.Namespace) -> int:
    stopped = Supervisor(deployment).stop()
    sys.stdout.write("all services are stopped\n" if stopped else "nothing was running\n")
    return 0


def _status(deployment: Deployment, _: argparse.Namespace) -> int:
    rows = status(deployment)
    _show(rows)
    return 0 if all(row.health == SERVING for row in rows) else 1


def _logs(deployment: Deployment, arguments: argparse.Namespace) -> int:
    paths = _log_files(deployment, arguments.service)
    if not arguments.follow:
        for path in paths:
            for line in tail(path, arguments.lines):
                sys.stdout.write(f"{line}\n")
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        for line in follow(paths, arguments.lines):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    return 0


def _log_files(deployment: Deployment, service: str | None) -> list[Path]:
    files = {program.name: program.log_file(deployment) for program in programs(deployment)}
    files["supervisord"] = supervisor_log(deployment)
    if service is None:
        return list(files.values())
    wanted = service.replace("/", "-")
    found = [path for name, path in files.items() if wanted in (name, name.rpartition("-")[0])]
    if not found:
        raise ConfigError(f"there is no service {service!r}; legal are {', '.join(files)}")
    return found


def _show(rows: list[Row]) -> None:
    table = Table(box=None)
    for column in ("service", "health", "pid", "up", "restarts", "phase", "grpc", "http"):
        table.add_column(column, overflow="fold", no_wrap=column != "health")
    for row in rows:
        state, entry = row.state, row.entry
        table.add_row(
            str(row.program.participant or row.program.name),
            row.health,
            str(state.pid or "") if state else "",
            f"{state.up_s} s" if state and state.pid else "",
            str(state.restarts) if state else "",
            entry.phase if entry else "",
            entry.grpc_address if entry else "",
            entry.http_address if entry else "",
        )
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)


if __name__ == "__main__":
    raise SystemExit(main())
