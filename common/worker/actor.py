"""The actor of a worker service: configuration, the step machine, and the tasks it starts.

Life of a run in a worker: UNCONFIGURED → CONFIGURING → READY, and back to UNCONFIGURED when the
run is released or the broker is lost; the controller configures again after that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any

import torch

from common.actor.actor import Actor, TaskEnded
from common.config.deployment import Deployment
from common.errors import ErrorCode, FailedPrecondition, RollplexError, Stale
from common.events.bodies import TaskFailed
from common.ids import NO_GROUP, Epoch, GroupId, Incarnation, Participant, RunId
from common.registry.runs import RunLedger
from common.step.machine import (
    EndStep,
    ForgetGroup,
    Instruction,
    StartStep,
    StartTask,
    StepMachine,
)
from common.step.tasks import Task
from common.worker.context import RunContext
from common.worker.link import Link
from common.worker.messages import (
    Configure,
    EventArrived,
    LinkLost,
    Message,
    Quiesce,
    Release,
    SaveCheckpoint,
)
from common.worker.scope import StepScope
from common.worker.status import WorkerStatus
from common.worker.work import Prepared, RunFactory, RunWork, StepWork

log = logging.getLogger(__name__)

IDLE = "idle"


class RunPhase(StrEnum):
    """Where a worker is with its run."""

    UNCONFIGURED = "unconfigured"
    """No run; events are ignored."""
    CONFIGURING = "configuring"
    """Loading, or checking that a step can begin."""
    READY = "ready"
    """Takes part in steps."""


class WorkerActor(Actor[Message]):
    """One worker process."""

    def __init__(
        self,
        participant: Participant,
        incarnation: Incarnation,
        deployment: Deployment,
        ledger: RunLedger,
        factory: RunFactory,
    ) -> None:
        super().__init__(str(participant), mailbox_capacity=65536)
        self.participant = participant
        self.incarnation = incarnation
        self._deployment = deployment
        self._ledger = ledger
        self._factory = factory
        self._device = torch.device(deployment.device)
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._phase = RunPhase.UNCONFIGURED
        self._link: Link | None = None
        self._context: RunContext | None = None
        self._run: RunWork | None = None
        self._machine: StepMachine | None = None
        self._scope: StepScope | None = None
        self._work: StepWork | None = None
        self._step_tasks: dict[str, tuple[StepScope, Task, GroupId | None]] = {}
        self._cause_id = ""
        self._events_seen = 0
        self._last_seen: tuple[RunId, int, Epoch] | None = None
        self._draining: list[asyncio.Future[None]] = []
        self._quiet = False
        self._shut_down = False

    # ---------------------------------------------------------------- messages

    async def handle(self, message: Message | TaskEnded) -> None:
        """Handle one message; errors of asks go into their answers."""
        match message:
            case EventArrived():
                await self._event_arrived(message)
            case TaskEnded():
                self._task_ended(message)
            case Configure():
                self._configure_asked(message)
            case LinkLost():
                if self._link is not None and message.link == self._link.number:
                    log.warning("link lost", extra={"reason": message.reason})
                    self._spawn_teardown("link lost")
            case Release():
                self._release_asked(message)
            case Quiesce():
                self._quiet = True
                self._draining.append(message.answer)
                self._answer_quiesced()
            case SaveCheckpoint():
                self._checkpoint_asked(message)

    async def _event_arrived(self, message: EventArrived) -> None:
        event = message.event
        self._events_seen += 1
        if self._machine is None or self._quiet:
            return
        self._cause_id = event.event_id
        self._execute(self._machine.handle(event))
        if self._work is not None and self._scope is not None and self._scope.view.belongs(event):
            await self._work.advance()

    def _task_ended(self, ended: TaskEnded) -> None:
        found = self._step_tasks.pop(ended.name, None)
        if found is not None:
            scope, task, group = found
            if scope is self._scope and self._machine is not None and not self._quiet:
                self._execute(self._machine.task_ended(task, group))
        elif ended.error is not None:
            log.error("task failed", extra={"task": ended.name, "error": repr(ended.error)})
        self._answer_quiesced()

    def _answer_quiesced(self) -> None:
        if self._draining and not self._step_tasks:
            for answer in self._draining:
                if not answer.done():
                    answer.set_result(None)
            self._draining.clear()

    # ---------------------------------------------------------------- steps

    def _execute(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case StartStep():
                    self._start_step()
                case StartTask(task=task, group=group):
                    self._start_task(task, group)
                case ForgetGroup(group=group):
                    if self._work is not None:
                        self._work.forget(group)
                case EndStep(reason=reason):
                    self._end_step(reason)

    def _start_step(self) -> None:
        assert self._machine is not None
        assert self._machine.view is not None
        assert self._link is not None
        assert self._run is not None
        plan = self._machine.view.plan
        self._last_seen = (plan.run_id, plan.step, plan.epoch)
        self._scope = StepScope(
            self._machine.view,
            participant=self.participant,
            broker=self._link.broker,
            compute=self._compute,
            publish=self._link.bus.publish,
            spawn=self._spawn_work,
        )
        self._work = self._run.begin(self._scope)

    def _start_task(self, task: Task, group: GroupId | None) -> None:
        assert self._scope is not None
        assert self._work is not None
        index = NO_GROUP if group is None else group
        name = f"{task}:{index}@{self._scope.plan.epoch}"
        self._step_tasks[name] = (self._scope, task, group)
        work = self._work.run(task, group, self._cause_id)
        self.spawn(name, self._guarded(self._scope, task, group, work))

    def _spawn_work(self, scope: StepScope, task: Task, work: Coroutine[Any, Any, None]) -> None:
        """Work of a step that belongs to no single group."""
        self.spawn(f"{task}@{scope.plan.epoch}", self._guarded(scope, task, None, work))

    async def _guarded(
        self,
        scope: StepScope,
        task: Task,
        group: GroupId | None,
        work: Coroutine[Any, Any, None],
    ) -> None:
        """Turn an error of the step's work into the event that ends the epoch."""
        try:
            await work
        except Exception as error:
            if scope.closed:
                log.debug("task of an ended epoch", extra={"task": task, "error": repr(error)})
                return
            log.exception("task failed", extra={"task": task, "group": group})
            await scope.publish(_failure(task, error), group, cause_id=self._cause_id)

    def _end_step(self, reason: str) -> None:
        scope, work = self._scope, self._work
        self._scope = self._work = None
        if scope is None or work is None:
            return
        log.debug("step ended", extra={"step": scope.plan.step, "reason": reason})
        scope.end()

        def close() -> None:
            try:
                work.close()
            finally:
                scope.close()

        self._compute.submit(close)

    # ---------------------------------------------------------------- asks

    def _configure_asked(self, ask: Configure) -> None:
        if self._phase is RunPhase.CONFIGURING:
            ask.answer.set_exception(
                FailedPrecondition(f"{self.participant} is still configuring; ask again")
            )
            return
        self._execute(self._machine.reset() if self._machine is not None else [])
        self._phase = RunPhase.CONFIGURING
        self._quiet = False
        self.spawn("configure", self._configure(ask))

    async def _configure(self, ask: Configure) -> None:
        try:
            prepared = await self._configured(ask)
        except Exception as error:  # noqa: BLE001 - goes to the asker, typed
            log.warning("configuration failed", extra={"error": repr(error)})
            await self._teardown()
            if not ask.answer.done():
                ask.answer.set_exception(error)
            return
        self._phase = RunPhase.READY
        if not ask.answer.done():
            ask.answer.set_result(prepared)

    async def _configured(self, ask: Configure) -> Prepared:
        same = self._context is not None and self._context.run_id == ask.run_id
        if not same or self._link is None or self._link.broker.closed.is_set():
            await self._teardown()
            self._phase = RunPhase.CONFIGURING
            self._link = await Link.open(self._deployment, self.participant, self.incarnation)
            self.spawn(f"events {self._link.number}", self._pump(self._link))
            self.spawn(f"broker {self._link.number}", self._watch(self._link))
            self._context = RunContext(
                run_id=ask.run_id,
                recipe=ask.recipe,
                run_dir=ask.run_dir,
                participant=self.participant,
                device=self._device,
                broker=self._link.broker,
                ledger=self._ledger,
                resume_from=ask.resume_from,
            )
            self._run = await self._factory(self._context)
        assert self._run is not None
        prepared = await self._run.prepare()
        self._machine = StepMachine(self._run.lanes, needs_reference=ask.recipe.needs_reference)
        return prepared

    async def _pump(self, link: Link) -> None:
        try:
            async for event in link.events():
                await self.mailbox.put(EventArrived(event=event))
        except RollplexError as error:
            await self.mailbox.put(LinkLost(link=link.number, reason=str(error)))

    async def _watch(self, link: Link) -> None:
        await self.mailbox.put(LinkLost(link=link.number, reason=await link.broken()))

    def _release_asked(self, ask: Release) -> None:
        if self._context is None or self._context.run_id != ask.run_id:
            ask.answer.set_result(None)
            return
        self._spawn_teardown("released", ask.answer)

    def _spawn_teardown(self, reason: str, answer: asyncio.Future[None] | None = None) -> None:
        if self._machine is not None:
            self._execute(self._machine.reset())

        async def teardown() -> None:
            await self._teardown()
            if answer is not None and not answer.done():
                answer.set_result(None)

        if self._phase is RunPhase.CONFIGURING:
            # The configuration that runs fails by itself: its connection is gone.
            if answer is not None:
                answer.set_result(None)
            return
        self._phase = RunPhase.UNCONFIGURED
        self.spawn(f"teardown {id(teardown):x} {reason}", teardown())

    async def _teardown(self) -> None:
        """Give up run and link, behind whatever the compute thread still does."""
        run, link = self._run, self._link
        self._run = self._link = self._context = self._machine = None
        self._phase = RunPhase.UNCONFIGURED
        await asyncio.get_running_loop().run_in_executor(self._compute, lambda: None)
        if run is not None:
            await run.close()
        if link is not None:
            await link.close()

    def _checkpoint_asked(self, ask: SaveCheckpoint) -> None:
        if self._run is None or self._context is None or self._context.run_id != ask.run_id:
            ask.answer.set_exception(
                FailedPrecondition(f"{self.participant} is not configured for run {ask.run_id}")
            )
            return
        if self._scope is not None:
            ask.answer.set_exception(
                FailedPrecondition("a step is running; checkpoints are written between steps")
            )
            return
        self.spawn("checkpoint", self._save_checkpoint(self._run, ask))

    async def _save_checkpoint(self, run: RunWork, ask: SaveCheckpoint) -> None:
        try:
            saved = await run.save_checkpoint(ask.epoch)
        except Exception as error:  # noqa: BLE001 - goes to the asker, typed
            if not ask.answer.done():
                ask.answer.set_exception(error)
            return
        if not ask.answer.done():
            ask.answer.set_result(saved)

    # ---------------------------------------------------------------- for the servicer

    def status(self) -> WorkerStatus:
        """What the worker is doing at this moment."""
        task: Task | None = None
        group: GroupId | None = None
        if self._machine is not None and self._machine.running:
            task, group = self._machine.running[0]
        phase = IDLE if self._phase is RunPhase.READY else self._phase.value
        run_id, step, epoch = self._last_seen or (RunId(""), 0, Epoch(0))
        return WorkerStatus(
            run_id=self._context.run_id if self._context is not None else run_id,
            step=step,
            epoch=epoch,
            phase=phase if task is None else task.value,
            group=group,
            events_seen=self._events_seen,
        )

    async def shut_down(self) -> None:
        """Drop the step, give up the run, stop the compute thread. Idempotent."""
        if self._shut_down:
            return
        self._shut_down = True
        if self._machine is not None:
            self._execute(self._machine.reset())
        await self._teardown()
        self._compute.shutdown(wait=True)


def _failure(task: Task, error: Exception) -> TaskFailed:
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
