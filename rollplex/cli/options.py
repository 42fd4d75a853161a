"""What all commands share: exit codes, the global options, output."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

    from rollplex.client import Client

FAILED = 1
BAD_INPUT = 2
UNREACHABLE = 3
INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options before the command's name.

    Attributes:
        address: of the controller; None: the deployment's.
    """

    address: str | None


async def connect(context: typer.Context) -> Client:
    """The controller that the options name. Raises Unavailable."""
    from rollplex.client import Client

    return await Client.connect(context.obj.address)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def on_terminal() -> bool:
    """Whether a person looks at the output as it comes."""
    return sys.stdout.isatty()
