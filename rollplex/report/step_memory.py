"""Memory over exactly one training step of the run that is at work."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import FailedPrecondition
from common.step.plan import StepMode
from rollplex.report.memory import sampled_memory
from rollplex.report.run_files import read_timeline
from rollplex.report.step_phases import step_phases

if TYPE_CHECKING:
    from rollplex.client import Client
    from rollplex.models import Run
    from rollplex.report.memory import MemorySeries
    from rollplex.report.step_phases import StepPhases


async def sample_step(client: Client) -> tuple[MemorySeries, StepPhases]:
    """Sample until a step that began after the first sample is committed.

    Returns: the samples of that step alone, and its phases.
    Raises: FailedPrecondition if no run is at work, it ends before that, or its folder is on
        another machine.
    """
    run = await _run_here(client)
    async with sampled_memory(client.ledger) as series:
        async for update in client.watch_run(run.run_id):
            record = update.step
            if record is None or record.mode is not StepMode.TRAIN or not series.times_s:
                continue
            spans = await asyncio.to_thread(read_timeline, Path(run.run_dir))
            phases = step_phases(record, spans)
            if phases is not None and series.start_s <= phases.start_s:
                return series.between(phases.start_s, phases.end_s), phases
    raise FailedPrecondition(f"run {run.run_id} ended before a whole step of it was sampled")


async def _run_here(client: Client) -> Run:
    run = await client.run_at_work()
    if not await asyncio.to_thread(Path(run.run_dir).is_dir):
        raise FailedPrecondition(
            f"the folder {run.run_dir} of run {run.run_id} is not on this machine; a step's "
            "phases are read from its timeline.jsonl"
        )
    return run
