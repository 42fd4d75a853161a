"""The work of epochs in one worker: the current one's tasks, and older ones' until they have ended.

Invariants:
- An epoch's tasks are cancelled when it ends. What they hold is given back behind the compute job
  that is running, so nothing is let go under a kernel.
- `settled` returns when no task of any epoch is left and the compute thread has nothing to do; only
  then may storages be examined or restored.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.errors import ErrorCode, RollplexError, Stale
from common.events.bodies import TaskCommanded, TaskFailed
from common.ids import NO_GROUP, GroupId, Participant
from common.step.tasks import AHEAD, Task
from common.worker.scope import StepScope, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Executor

    from common.events.event import Event
    from common.step.view import StepView
    from common.worker.device import WorkerDevice
    from common.worker.governor import Governor
    from common.worker.link import Link
    from common.worker.own_memory import OwnMemory
    from common.worker.work import RunWork, StepWork

log = logging.getLogger(__name__)

BEGIN = "begin"
"""`TaskFailed.task` when an epoch could not be begun at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One task of the actor that belongs to an epoch, or to none (`scope` is None)."""

    label: str
    scope: StepScope | None
    task: Task | None
    group: GroupId | None


class EpochWork:
    """See the module's text. Its methods are called by the actor's handler only."""

    def __init__(
        self,
        participant: Participant,
        compute: Executor,
        device: WorkerDevice,
        *,
        spawn: Callable[[str, Coroutine[Any, Any, Any]], None],
        cancel: Callable[[str], bool],
    ) -> None:
        """Args: spawn, cancel: the actor's."""
        self._participant = participant
        self._compute = compute
        self._device = device
        self._spawn = spawn
        self._cancel = cancel
        self._scope: StepScope | None = None
        self._work: StepWork | None = None
        self._jobs: dict[str, _Job] = {}
        self._numbers = itertools.count(1)
        self._idle = asyncio.Event()
        self._idle.set()
        self._cause_id = ""
        self._own_memory: OwnMemory | None = None
        self._keeps_cache = False

    @property
    def running(self) -> bool:
        """Whether an epoch is under way here."""
        return self._scope is not None

    @property
    def idle(self) -> bool:
        """Whether no task is left, of the current epoch or of older ones."""
        return not self._jobs

    @property
    def idle_beside(self) -> bool:
        """Whether no work that belongs to no epoch is left."""
        return all(job.scope is not None for job in self._jobs.values())

    def begin(
        self,
        view: StepView,
        run: RunWork,
        link: Link,
        own_memory: OwnMemory,
        governor: Governor | None = None,
    ) -> None:
        """Start an epoch. One that cannot be started is reported as failed."""
        scope = StepScope(
            view,
            participant=self._participant,
            broker=link.broker,
            compute=self._compute,
            device=self._device,
            governor=governor,
            own_memory=own_memory,
            publish=link.bus.publish,
            spawn=self._spawn_beside,
        )
        self._scope = scope
        self._own_memory = own_memory
        self._keeps_cache = run.keeps_cache
        try:
            self._work = run.begin(scope)
        except Exception as error:
            log.exception("epoch not begun", extra={"step": view.plan.step})
            self._start(BEGIN, scope, None, None, self._report(scope, BEGIN, None, error))

    def start(self, task: Task, group: GroupId | None) -> None:
        """Start a task of the current epoch."""
        if self._scope is None or self._work is None:
            return
        run, cause_id = self._work.run, self._cause_id
        about = None if task in AHEAD else group
        work = self._guarded(self._scope, task, about, lambda: run(task, group, cause_id))
        self._start(task, self._scope, task, group, work)

    def command(self, number: int, task: Task, group: GroupId | None) -> None:
        """Tell the service's other ranks of a task that was started."""
        if self._scope is None:
            return
        scope, cause_id = self._scope, self._cause_id
        body = TaskCommanded(number=number, task=task, group=group)
        work = self._guarded(scope, task, None, lambda: scope.publish(body, cause_id=cause_id))
        self._start(f"{task} command", scope, None, group, work)

    def forget(self, group: GroupId) -> None:
        """The group was dropped."""
        if self._work is not None and self._scope is not None:
            self._work.forget(group)
            self._scope.forget(group)

    def caused_by(self, event: Event) -> None:
        """What is started next is because of this event."""
        self._cause_id = event.event_id

    async def advance(self, event: Event) -> None:
        """The event was folded into the view."""
        if self._work is not None and self._scope is not None and self._scope.view.belongs(event):
            await self._work.advance()

    def end(self, reason: str) -> None:
        """End the epoch: cancel its tasks, give back what it holds behind the compute thread."""
        scope, work = self._scope, self._work
        self._scope = self._work = None
        if scope is None:
            return
        log.debug("step ended", extra={"step": scope.plan.step, "reason": reason})
        scope.end()
        keeps_cache, own_memory = self._keeps_cache, self._own_memory
        assert own_memory is not None
        for name, job in self._jobs.items():
            if job.scope is scope:
                self._cancel(name)

        def close() -> None:
            try:
                if work is not None:
                    work.close()
            except Exception:
                log.exception("work of an ended epoch not closed")
            finally:
                scope.close()
                own_memory.look() if keeps_cache else own_memory.give_back()

        self._compute.submit(close)

    def beside(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        """Run work that belongs to no epoch, and that `settled` waits for."""
        self._start(name, None, None, None, work)

    def cancel_beside(self, name: str) -> None:
        """Cancel all such work. It counts as running until it has ended."""
        for job_name, job in self._jobs.items():
            if job.scope is None and job.label == name:
                self._cancel(job_name)

    def task_ended(self, name: str) -> tuple[bool, tuple[Task, GroupId | None] | None]:
        """A task of the actor has ended.

        Returns: whether it was one of these; task and group where the current epoch started it.
        """
        job = self._jobs.pop(name, None)
        if not self._jobs:
            self._idle.set()
        if job is None:
            return False, None
        if job.task is None or job.scope is not self._scope:
            return True, None
        return True, (job.task, job.group)

    async def settled(self) -> None:
        """Wait until nothing of any ended epoch runs any more, in the loop or in compute."""
        await self._idle.wait()
        await asyncio.get_running_loop().run_in_executor(self._compute, lambda: None)

    # ---------------------------------------------------------------- tasks

    def _start(
        self,
        label: str,
        scope: StepScope | None,
        task: Task | None,
        group: GroupId | None,
        work: Coroutine[Any, Any, Any],
    ) -> None:
        index = NO_GROUP if group is None else group
        name = f"{label}:{index} #{next(self._numbers)}"
        self._jobs[name] = _Job(label=label, scope=scope, task=task, group=group)
        self._idle.clear()
        try:
            self._spawn(name, work)
        except RollplexError:
            # The actor is being stopped; nothing will tell of this task's end.
            self.task_ended(name)
            raise

    def _spawn_beside(self, scope: StepScope, task: Task, work: Work) -> None:
        """Work of an epoch that is no task of the machine."""
        self._start(f"{task} loop", scope, None, None, self._guarded(scope, task, None, work))

    async def _guarded(
        self,
        scope: StepScope,
        task: Task,
        group: GroupId | None,
        work: Work,
    ) -> None:
        """Turn an error of the epoch's work into the event that ends the epoch.

        Args: group: of this step, that the work is about.
        """
        try:
            await work()
        except Exception as error:
            if scope.closed or (group is not None and not scope.view.groups[group].alive):
                log.debug("task not wanted any more", extra={"task": task, "error": repr(error)})
                return
            log.exception("task failed", extra={"task": task, "group": group})
            await self._report(scope, task, group, error)

    async def _report(
        self, scope: StepScope, task: str, group: GroupId | None, error: Exception
    ) -> None:
        try:
            await scope.publish(_failure(task, error), group, cause_id=self._cause_id)
        except RollplexError as lost:
            # The epoch has ended, or the link has: both are dealt with where they are noticed.
            log.debug("failure not reported", extra={"task": task, "cause": str(lost)})


def _failure(task: str, error: Exception) -> TaskFailed:
    if isinstance(error, RollplexError):
        code, retryable = error.code, error.retryable or isinstance(error, Stale)
    else:
        code, retryable = ErrorCode.INTERNAL, True
    return TaskFailed(
        task=task,
        code=code.value,
        type=type(error).__name__,
        message=str(error),
        retryable=retryable,
    )
