"""Drives an engine through one step, one turn at a time, in the compute thread.

A turn admits what is ready and decodes until a group is complete, or until the engine has to wait
for a group. Between turns the loop takes in groups that became ready or were dropped.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from common.step.tasks import Task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from common.ids import GroupId
    from common.worker.live_decode import LiveDecode
    from common.worker.scope import StepScope
    from services.rollout.engines.protocol import Engine, FinishedGroup, GroupRequest, StepSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one turn did."""

    admitted: tuple[GroupId, ...]
    """Their K/V are in the engine; what they came from is not needed any more."""
    finished: tuple[FinishedGroup, ...]
    """In the order (iteration, group)."""
    decoding: bool
    """Whether a sequence decodes, or will with the next turn."""
    start_ns: int
    end_ns: int


class DecodeLoop:
    """One step of one engine."""

    def __init__(
        self, engine: Engine, spec: StepSpec, scope: StepScope, *, live: LiveDecode
    ) -> None:
        """Args: live: told what decodes, in the compute thread: the sequences before each
        iteration and at the end of each turn, admissions, and iterations that have ended.
        """
        self._live = live
        self._engine = engine
        self._spec = spec
        self._scope = scope
        self._added: list[GroupRequest] = []
        self._dropped: list[GroupId] = []
        self._changed = asyncio.Event()
        self._decodes = False

    def add(self, request: GroupRequest) -> None:
        """The group is ready."""
        self._added.append(request)
        self._changed.set()

    def drop(self, group: GroupId) -> None:
        """The group will not come."""
        self._dropped.append(group)
        self._changed.set()

    async def turns(self) -> AsyncIterator[Turn]:
        """Turn after turn, until every group of the step is complete or dropped.

        The memory of the decode is the device's again when the last turn has been taken.

        Raises: StepOver when the epoch ends.
        """
        await self._scope.run(Task.DECODE, lambda: self._engine.begin_step(self._spec))
        done = waits = False
        while not done:
            if waits:
                await self._changed.wait()
            self._changed.clear()
            added, self._added = self._added, []
            dropped, self._dropped = self._dropped, []
            timed = await self._scope.run(Task.DECODE, partial(self._turn, added, dropped))
            turn, waits, done = timed.value
            yield turn
        await self._scope.return_memory(self._engine.release)

    def _turn(self, added: list[GroupRequest], dropped: list[GroupId]) -> tuple[Turn, bool, bool]:
        """Runs in the compute thread. Returns the turn, whether to wait, whether all is done."""
        engine, start_ns = self._engine, time.monotonic_ns()
        for request in added:
            engine.add_group(request)
        for group in dropped:
            engine.drop_group(group)
        admitted: list[GroupId] = []
        finished: list[FinishedGroup] = []
        while not engine.finished and not finished:
            self._scope.check()
            while (taken := engine.admit_next()) is not None:
                admitted.append(taken)
                self._live.admitted()
            if engine.needs_next_group() or engine.finished:
                break
            if not self._decodes:
                # Give the loop the chance to say that the window opens, before it does.
                self._decodes = engine.decodes()
                break
            self._live.set_rows(engine.active_rows)
            iteration = engine.run_iteration()
            finished.extend(iteration.finished)
            if iteration.count:
                self._live.iterated(iteration.count)
        waits = engine.needs_next_group()
        # While it waits for a group nothing decodes: those that make the group need not go slowly.
        self._live.set_rows(engine.active_rows if self._decodes and not waits else 0)
        turn = Turn(
            admitted=tuple(admitted),
            finished=tuple(finished),
            decoding=self._decodes,
            start_ns=start_ns,
            end_ns=time.monotonic_ns(),
        )
        return turn, waits, engine.finished
