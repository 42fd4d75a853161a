"""The latest state of one run for any number of watchers.

A watcher that is slower than the run sees the latest state, not every one: nothing is queued.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protos.rollplex.v1 import control_pb2 as pb
from services.controller.convert import phase_to_proto, run_to_proto, step_to_proto

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from services.controller.fleet import PhaseSeen
    from services.controller.record import RunRecord, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbered:
    """Something shown once to each watcher that was there before it."""

    number: int
    step: StepRecord | None = None
    note: str = ""


class RunFeed:
    """Written by the actor, read by any number of `watch` iterators."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self._waits_for = ""
        self._phases: tuple[PhaseSeen, ...] = ()
        self._number = 0
        self._step = _Numbered(number=0)
        self._note = _Numbered(number=0)
        self._changed = asyncio.Event()

    @property
    def run(self) -> pb.Run:
        """The run as clients see it now."""
        return run_to_proto(self.record, waits_for=self._waits_for)

    def saved(self, record: RunRecord, step: StepRecord | None = None) -> None:
        """The record is on disk, with a step that was committed in the same move."""
        self.record = record
        self._advance()
        if step is not None:
            self._step = _Numbered(number=self._number, step=step)

    def waits_for(self, reason: str) -> None:
        """Why nothing happens at the moment; empty: something does."""
        if reason != self._waits_for:
            self._waits_for = reason
            self._advance()

    def phases(self, phases: Sequence[PhaseSeen]) -> None:
        """What the workers do."""
        if tuple(phases) != self._phases:
            self._phases = tuple(phases)
            self._advance()

    def note(self, text: str) -> None:
        """One line for a person."""
        self._advance()
        self._note = _Numbered(number=self._number, note=text)

    async def watch(self) -> AsyncIterator[pb.RunUpdate]:
        """The latest state at once, then after each change; ends with the run."""
        seen = self._number
        yield pb.RunUpdate(run=self.run, phases=[phase_to_proto(p) for p in self._phases])
        while not self.record.state.ended or self._number > seen:
            while self._number == seen:
                await self._changed.wait()
            update = self._update(seen)
            seen = self._number
            yield update

    def _update(self, seen: int) -> pb.RunUpdate:
        update = pb.RunUpdate(
            run=self.run,
            phases=[phase_to_proto(phase) for phase in self._phases],
            note=self._note.note if self._note.number > seen else "",
        )
        if self._step.step is not None and self._step.number > seen:
            update.step.CopyFrom(step_to_proto(self._step.step))
        return update

    def _advance(self) -> None:
        self._number += 1
        self._changed.set()
        self._changed = asyncio.Event()
