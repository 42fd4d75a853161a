"""The `rollplex` command.

Exit codes: 0 all went well; 1 the run failed or was stopped, or a check found a fault; 2 the input
was wrong; 3 the controller could not be reached.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    RollplexError,
    Unavailable,
)
from rollplex.cli import (
    control,
    layout,
    machine,
    memory,
    model,
    plan,
    proof,
    runs,
    weights,
)
from rollplex.cli.options import BAD_INPUT, FAILED, INTERRUPTED, UNREACHABLE, Options

if TYPE_CHECKING:
    from collections.abc import Sequence

app = typer.Typer(
    name="rollplex",
    help="RL post-training of vision-language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for group in (model, plan, layout, runs, control, memory, weights, machine, proof):
    group.register(app)


@app.callback()
def options(
    context: typer.Context,
    address: Annotated[
        str | None,
        typer.Option(
            help="Controller, host:port. Default: that of the deployment in ROLLPLEX_CONFIG."
        ),
    ] = None,
) -> None:
    """RL post-training of vision-language models."""
    context.obj = Options(address=address)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns: the exit code."""
    try:
        app(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="rollplex")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except RollplexError as error:
        sys.stderr.write(f"error: {error}\n")
        return _exit_code(error)
    return 0


def _exit_code(error: RollplexError) -> int:
    if isinstance(error, Unavailable | DeadlineExceeded):
        sys.stderr.write(
            "Is the node up? `python -m deploy.local status` shows it, `rollplex doctor` what may "
            "be missing.\n"
        )
        return UNREACHABLE
    if isinstance(error, InvalidArgument | NotFound | FailedPrecondition):
        return BAD_INPUT
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
