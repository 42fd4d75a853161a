"""One epoch's work for the next step's prompts: prepared, through the tower, through the reference.

All of it may be missing or come to nothing: a prompt that is not ready when its step begins is
worked on then, with the same result.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, TypeVar

import torch

from common.data.errors import SampleError
from common.events import WorkSpan, bodies
from common.step.plan import TRAIN_SPLIT
from common.step.tasks import Task
from services.prefix_encoder.ahead import sample_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.ids import GroupId
    from common.step.plan import PlannedGroup
    from common.step.view import StepView
    from common.worker.scope import StepScope
    from services.prefix_encoder.forwards import Forwards
    from services.prefix_encoder.holds import WeightHolds
    from services.prefix_encoder.run import PrefixEncoderRun

log = logging.getLogger(__name__)

T = TypeVar("T")


class AheadStep:
    """One epoch."""

    def __init__(
        self, run: PrefixEncoderRun, scope: StepScope, holds: WeightHolds, forwards: Forwards
    ) -> None:
        self._run = run
        self._scope = scope
        self._holds = holds
        self._forwards = forwards
        self._planned = {planned.group: planned for planned in scope.plan.ahead}
        self._full = False

    async def run(self, task: Task, index: GroupId, cause_id: str) -> None:
        """Do one task of one group of `StepPlan.ahead`; says so if its result is there then."""
        planned = self._planned[index]
        match task:
            case Task.AHEAD_PREPARE:
                done, span = await self._prepare(planned)
            case Task.AHEAD_VISION:
                done, span = await self._vision(planned)
            case Task.AHEAD_REFERENCE:
                done, span = await self._reference(planned)
            case _:
                raise AssertionError(f"{task} is not done ahead")
        if done:
            body = bodies.AheadDone(task=task, index=index)
            await self._scope.publish(body, span=span, cause_id=cause_id)

    async def _prepare(self, planned: PlannedGroup) -> tuple[bool, WorkSpan | None]:
        run, key = self._run, sample_key(planned)
        if run.ahead.get(key) is not None:
            return True, None
        if self._full:
            # Preparing it would only push others out of the workers' cache.
            return False, None
        start_ns = time.monotonic_ns()
        try:
            sample = await run.pool.prepare(*key)
        except SampleError:
            # It is told when the step comes that has this prompt.
            return False, None
        with run.ahead.room(sample.size_bytes) as fits:
            if not fits:
                self._full = True
                return False, None
            try:
                loaded = await run.load(sample)
            except torch.OutOfMemoryError as error:
                _no_memory(error)
                return False, None
            run.ahead.put(key, loaded)
        span = WorkSpan(task=Task.AHEAD_PREPARE, start_ns=start_ns, end_ns=time.monotonic_ns())
        return True, span

    async def _vision(self, planned: PlannedGroup) -> tuple[bool, WorkSpan | None]:
        loaded = self._run.ahead.get(sample_key(planned))
        if loaded is None or loaded.vision is not None:
            return loaded is not None, None
        if not self._holds.has_policy:
            return False, None
        prompt = loaded.prompt
        with self._holds.reading_ahead():
            encoded = await self._scope.run(
                Task.AHEAD_VISION,
                while_decoding(self._scope.view, lambda: self._forwards.policy_vision(prompt)),
                work=loaded.text.vision_tokens,
            )
        if encoded.value is None:
            return False, None
        loaded.vision = encoded.value
        if self._run.one_tower:
            loaded.prompt = prompt.without_pixels()
        return True, encoded.span

    async def _reference(self, planned: PlannedGroup) -> tuple[bool, WorkSpan | None]:
        store = self._run.ahead
        loaded = store.get(sample_key(planned))
        if loaded is None or loaded.reference is not None:
            return loaded is not None, None
        scored = planned.split == TRAIN_SPLIT
        if not (scored and store.takes_reference and self._holds.has_policy):
            return False, None
        if not self._scope.view.window_open:
            # Weights that nobody needs any more would have to come back for nothing.
            return False, None
        prompt, vision = loaded.prompt, loaded.vision
        with self._holds.reading_ahead():
            async with self._holds.reference.reading():
                encoded = await self._scope.run(
                    Task.AHEAD_REFERENCE,
                    while_decoding(
                        self._scope.view, lambda: self._forwards.reference_prefix(prompt, vision)
                    ),
                    work=prompt.prefix_tokens,
                )
        if encoded.value is None:
            return False, None
        loaded.reference = encoded.value
        return True, encoded.span


def while_decoding(view: StepView, job: Callable[[], T]) -> Callable[[], T | None]:
    """A job that gives None instead of running late, or of failing for want of memory.

    It may have waited for its turn until the window has closed, and this step's own work comes
    before it then.
    """

    def guarded() -> T | None:
        if not view.window_open:
            return None
        try:
            return job()
        except torch.OutOfMemoryError as error:
            _no_memory(error)
            return None

    return guarded


def _no_memory(error: torch.OutOfMemoryError) -> None:
    log.warning("nothing was done ahead: no memory", extra={"cause": str(error)})
