"""The services under a memory budget, and runs that may find it too small."""

from __future__ import annotations

import re
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from bench.step_memory import MemoryTrace, memory_trace
from bench.step_summary import timed_steps
from common.errors import FailedPrecondition, ResourceExhausted
from rollplex.client import Client
from rollplex.models import RunState
from rollplex.verify.node import temporary_node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from common.config.recipe import Recipe
    from rollplex.models import Run, StepRecord

_CREATE = timedelta(minutes=10)
_PATIENCE = timedelta(seconds=120)
_GIB = 1 << 30
_REASON_LINES = 3
"""Of an error: the ledger follows, which is long."""
_NO_MEMORY = re.compile(
    r"ArenaFull|ResourceExhausted|NoMemoryForPrefix|out.?of.?memory|got no room in time|"
    r"not restored in time|not granted in time: the storage is (?:spilled|restoring)|"
    r"waiting cannot help|alloc_failed|cannot allocate memory",
    re.IGNORECASE,
)
"""In the cause of a failure: a refusal, or an allocator or driver without memory."""


class Outcome(StrEnum):
    """What came of a run."""

    FITS = "fits"
    TOO_LARGE = "does not fit"
    """Refused, out of memory, or more than the budget was taken."""
    FAILED = "failed"
    """For another reason, which says nothing about memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One run.

    Attributes:
        reason: why it does not fit or failed.
        peak_gib: of the GPU as the driver counts it; of a CPU, of the arena; None: not seen.
        steps: that were committed.
    """

    outcome: Outcome
    reason: str
    peak_gib: float | None
    steps: tuple[StepRecord, ...]


class BudgetedNode:
    """Made by `budgeted_node`."""

    def __init__(self, client: Client, memory: MemoryTrace, *, budget_gib: float) -> None:
        self._client = client
        self._memory = memory
        self._budget_gib = budget_gib

    async def attempt(self, asked: Recipe, run_dir: Path) -> Attempt:
        """Make the run; its first step that has to begin again ends it.

        A run does not fit either if it took more than the budget, or dropped a graph that its
        recipe says is kept.
        """
        begin_s = time.monotonic()
        try:
            made = await self._client.create_run(asked, run_dir=run_dir, deadline=_CREATE)
        except ResourceExhausted as error:
            return self._attempt(begin_s, run_dir, Outcome.TOO_LARGE, str(error))
        run, notes = await self._follow(made)
        if run.state is not RunState.SUCCEEDED or run.restarts:
            reason = "; ".join([*notes, run.reason]) if run.restarts else run.reason
            outcome = Outcome.TOO_LARGE if _NO_MEMORY.search(reason) else Outcome.FAILED
            return self._attempt(begin_s, run_dir, outcome, reason)
        found = self._attempt(begin_s, run_dir, Outcome.FITS, "")
        reason = self._over_budget(found) or _dropped_graphs(asked, found)
        return self._attempt(begin_s, run_dir, Outcome.TOO_LARGE, reason) if reason else found

    async def _follow(self, run: Run) -> tuple[Run, list[str]]:
        """To its end, with what the controller noted."""
        notes: list[str] = []
        async for update in self._client.watch_run(run.run_id, patience=_PATIENCE):
            run = update.run
            notes += [update.note] if update.note else []
            if run.restarts and not run.state.ended:
                with suppress(FailedPrecondition):  # it has ended meanwhile
                    await self._client.stop(run.run_id)
        return run, notes

    def _attempt(self, begin_s: float, run_dir: Path, outcome: Outcome, reason: str) -> Attempt:
        seen = self._memory.device_bytes or self._memory.ledger_bytes
        peak_bytes = self._memory.peak(seen, begin_s, time.monotonic())
        return Attempt(
            outcome=outcome,
            reason="\n".join(reason.splitlines()[:_REASON_LINES]),
            peak_gib=None if peak_bytes is None else peak_bytes / _GIB,
            steps=tuple(timed_steps(run_dir, warm_up=0)),
        )

    def _over_budget(self, found: Attempt) -> str:
        if found.peak_gib is None or found.peak_gib <= self._budget_gib:
            return ""
        return f"peaked at {found.peak_gib:.2f} GiB, the budget is {self._budget_gib:g}"


def _dropped_graphs(asked: Recipe, found: Attempt) -> str:
    if asked.training.prefix_graphs != "all":
        return ""
    again = sum(step.metrics.get("prefixes_recomputed", 0.0) for step in found.steps)
    return f"{again:g} prefixes did not keep their graph" if again else ""


@asynccontextmanager
async def budgeted_node(
    folder: Path,
    *,
    device: str,
    budget_gib: float,
    arena_gib: float,
    spill_gib: float | None,
) -> AsyncIterator[BudgetedNode]:
    """Start every service with so much memory of the device that they compute on.

    Args:
        folder: for state and logs.
        device: `cuda`: `hbm_budget_gib` is the budget; `cpu`: `arena_gib` is.
        arena_gib: memory of the host that the broker of a GPU may hand out.
        spill_gib: memory of the host for spilled contents; None: half of all.
    """
    on_gpu = device == "cuda"
    settings: dict[str, Any] = {"spill_gib": spill_gib}
    if on_gpu:
        settings["hbm_budget_gib"] = budget_gib
    async with (
        temporary_node(
            folder,
            device=device,
            arena_gib=arena_gib if on_gpu else budget_gib,
            settings=settings,
        ) as address,
        await Client.connect(address) as client,
        memory_trace(client, device=device) as memory,
    ):
        yield BudgetedNode(client, memory, budget_gib=budget_gib)
