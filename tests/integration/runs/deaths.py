"""A run whose processes are killed, held against one whose are not."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollplex.models import RunState
from tests.integration.runs.moments import Striker
from tests.integration.runs.recipes import different, final_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.config.recipe import Recipe
    from tests.integration.runs.lab import Lab

PATIENCE = timedelta(seconds=300)


async def assert_survives(
    lab: Lab,
    wanted: Recipe,
    blows: Sequence[tuple[Any, str]],
    *,
    patience: timedelta = PATIENCE,
) -> None:
    """Kill each victim at its moment, all in one run and in different steps; the bits are those of
    an undisturbed run.

    Args:
        blows: a moment, which is a method of `Striker`, and a process's name.
        patience: as for `Client.wait_run`.
    """
    (calm,) = await lab.succeeded({"calm": wanted})
    async with lab.node.client() as client:
        run = await client.create_run(wanted, run_dir=lab.folder / "killed")
        async with Striker(lab.node, client, run) as striker:
            ended = asyncio.create_task(client.wait_run(run.run_id, patience=patience))
            struck = [await moment(striker, victim) for moment, victim in blows]
            run = await ended
    assert run.state is RunState.SUCCEEDED, run.reason
    assert len({blow.step for blow in struck}) == len(blows)
    assert different(calm.tensors, final_tensors(Path(run.run_dir))) == []
