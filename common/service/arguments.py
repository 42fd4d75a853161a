"""The command line that all services share."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.ids import Participant, Service

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceArguments:
    """`--config f.toml --set a.b=v --rank 0`, read.

    Attributes:
        participant: who this process is.
        config: deployment file; None: `ROLLPLEX_CONFIG`, else the defaults.
        sets: `key=value` items, in order.
    """

    participant: Participant
    config: Path | None
    sets: tuple[str, ...]


def parse_arguments(service: Service, argv: Sequence[str] | None = None) -> ServiceArguments:
    """Read a service's command line; exits with 2 and a usage line when it is wrong."""
    parser = argparse.ArgumentParser(
        prog=f"python -m services.{service.value.replace('-', '_')}",
        description=f"One {service} process.",
    )
    add_config_arguments(parser)
    parser.add_argument("--rank", type=int, default=0, help="rank of this process (default 0)")
    parsed = parser.parse_args(argv)
    if parsed.rank < 0:
        parser.error(f"--rank {parsed.rank}: has to be 0 or more")
    return ServiceArguments(
        participant=Participant(service=service, rank=parsed.rank),
        config=parsed.config,
        sets=tuple(parsed.sets),
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and `--set`, as every command has them."""
    parser.add_argument("--config", type=Path, help="deployment file, TOML or resolved JSON")
    parser.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one value, such as log_level=debug; may be repeated",
    )
