"""Runs that several tests look at: made once, on first use, and as many at a time as are wanted."""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollplex.models import RunState
from tests.integration.runs.recipes import final_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from common.config.recipe import Recipe
    from rollplex.client import Client
    from rollplex.models import Run
    from tests.integration.runs.node import Node

ADMITTED_AT_ONCE = 2
"""A run is checked in processes of its own before it is queued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that has ended, and its folder."""

    run: Run
    folder: Path

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        return final_tensors(self.folder)

    @property
    def steps(self) -> list[dict[str, Any]]:
        return _lines(self.folder / "steps.jsonl")

    @property
    def timeline(self) -> list[dict[str, Any]]:
        return _lines(self.folder / "timeline.jsonl")


class Lab:
    """Runs on one node, each in a folder of its name in the lab's own."""

    def __init__(self, node: Node, model: Path) -> None:
        self.node = node
        self.model = model
        self.folder = Path(tempfile.mkdtemp(dir=node.folder))
        self._finished: dict[str, Finished] = {}

    async def finished(self, wanted: Mapping[str, Recipe], **options: Any) -> list[Finished]:
        """Runs by name; those that were not made yet are made, all of them in the queue at once.

        Args: options: for `Client.create_run`.
        """
        missing = {name: recipe for name, recipe in wanted.items() if name not in self._finished}
        room = asyncio.Semaphore(ADMITTED_AT_ONCE)
        async with self.node.client() as client:

            async def make(name: str, recipe: Recipe) -> None:
                folder = self.folder / name
                async with room:
                    run = await client.create_run(recipe, run_dir=folder, **options)
                run = await client.wait_run(run.run_id)
                self._finished[name] = Finished(run=run, folder=folder)

            async with asyncio.TaskGroup() as group:
                for name, recipe in missing.items():
                    group.create_task(make(name, recipe))
        return [self._finished[name] for name in wanted]

    async def succeeded(self, wanted: Mapping[str, Recipe], **options: Any) -> list[Finished]:
        """The same; every one of them has succeeded."""
        found = await self.finished(wanted, **options)
        for one in found:
            assert one.run.state is RunState.SUCCEEDED, (one.run.run_id, one.run.reason)
        return found


async def reach(client: Client, run_id: str, state: RunState, *, steps: int = 0) -> Run:
    """Wait until a run is in a state and has so many steps."""
    async for update in client.watch_run(run_id):
        run = update.run
        if run.state is state and run.steps_done >= steps:
            return run
        assert not run.state.ended, (run.state, run.reason)
    raise AssertionError(f"run {run_id} ended before it was {state}")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
