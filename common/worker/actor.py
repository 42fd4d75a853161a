"""The actor of a worker service: configuration, the step machine, and the tasks it starts.

Life of a run in a worker: UNCONFIGURED → CONFIGURING → READY, and back to UNCONFIGURED when the
run is released or the link to the broker is lost; the controller configures again after that.
Changes of the run (load, give up) are made one after the other, each when the work of every ended
epoch has come to its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from common.actor.actor import Actor, TaskEnded
from common.errors import FailedPrecondition, RollplexError, Unavailable
from common.events.bodies import MemoryWanted, StepBegan
from common.ids import Epoch, GroupId, Incarnation, Participant, RunId
from common.step.machine import (
    CommandTask,
    EndStep,
    ForgetGroup,
    Instruction,
    StartStep,
    StartTask,
    StepMachine,
)
from common.tensors.device import HOST
from common.worker.answers import refuse, settle, settle_with
from common.worker.checksums import checksum_weights
from common.worker.epochs import EpochWork
from common.worker.holder import RunHolder
from common.worker.messages import (
    ChecksumWeights,
    Configure,
    EventArrived,
    LinkLost,
    Message,
    Quiesce,
    Release,
    SaveCheckpoint,
    ShutDown,
)
from common.worker.ranks import LOOK_EVERY_S, PARTED_AFTER_S, RanksParted
from common.worker.status import WorkerStatus

if TYPE_CHECKING:
    from common.config.deployment import Deployment
    from common.events import Event
    from common.registry.runs import RunLedger
    from common.step.tasks import Task
    from common.worker.device import WorkerDevice
    from common.worker.link import Link
    from common.worker.work import Prepared, RunFactory, RunWork

log = logging.getLogger(__name__)

IDLE = "idle"
CHECKPOINT = "checkpoint"
CHECKSUMS = "checksums"
_CHANGE = "change"

Change = Configure | Release | LinkLost | ShutDown
"""What the run is changed by; all but `Configure` give it up."""


class RunPhase(StrEnum):
    """Where a worker is with its run."""

    UNCONFIGURED = "unconfigured"
    """No run, or one that is being given up; events are ignored."""
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
        device: WorkerDevice,
    ) -> None:
        super().__init__(str(participant), mailbox_capacity=65536)
        self.participant = participant
        self.incarnation = incarnation
        self._compute = ThreadPoolExecutor(
            1, thread_name_prefix="compute", initializer=device.enter
        )
        self._device = device
        self._epochs = EpochWork(
            participant, self._compute, device, spawn=self.spawn, cancel=self.cancel
        )
        self._holder = RunHolder(
            participant,
            incarnation,
            deployment,
            ledger,
            factory,
            device,
            opened=self._link_opened,
        )
        self._partners = deployment.partners
        self._parted = asyncio.Event()
        self._phase = RunPhase.UNCONFIGURED
        self._machine: StepMachine | None = None
        self._changing: Change | None = None
        self._changes: deque[Change] = deque()
        self._saving = False
        self._checks: list[asyncio.Future[Any]] = []
        self._quiet = False
        self._shutting_down = False
        self._draining: list[asyncio.Future[None]] = []
        self._fence = Epoch(0)
        self._events_seen = 0
        self._last_seen: tuple[RunId, int, Epoch] | None = None
        self._given_up = False

    @property
    def trouble(self) -> str:
        """What keeps the run that it holds from working; empty: nothing."""
        run = self._holder.run
        return "" if run is None else run.trouble

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
                self._link_lost(message)
            case Release():
                self._release_asked(message)
            case Quiesce():
                self._quiet = True
                self._stop_checks()
                self._draining.append(message.answer)
                self._answer_quiesced()
            case ShutDown():
                self._shut_down_asked(message)
            case SaveCheckpoint():
                self._checkpoint_asked(message)
            case ChecksumWeights():
                self._checksums_asked(message)

    async def _event_arrived(self, message: EventArrived) -> None:
        event = message.event
        self._events_seen += 1
        if isinstance(event.body, MemoryWanted):
            self._memory_wanted(event.body)
            return
        if self._machine is None or self._quiet or self._is_from_before(event):
            return
        self._epochs.caused_by(event)
        self._execute(self._machine.handle(event))
        await self._epochs.advance(event)

    def _memory_wanted(self, wanted: MemoryWanted) -> None:
        """Between two compute jobs; see `WorkerDevice.give_back`."""
        own_memory = self._holder.own_memory
        if own_memory is not None and wanted.device == (self._device.uuid or HOST):
            self._compute.submit(own_memory.give_back)

    def _is_from_before(self, event: Event) -> bool:
        """Whether it begins an epoch in which this worker, as it is configured now, has no part.

        A new link is told of the newest epoch first, and that one may be long over.
        """
        if not isinstance(event.body, StepBegan):
            return False
        return event.run_id != self._holder.run_id or event.epoch <= self._fence

    def _task_ended(self, ended: TaskEnded) -> None:
        if ended.name == _CHANGE:
            self._changed(ended)
            return
        ours, started = self._epochs.task_ended(ended.name)
        if started is not None and self._machine is not None and not self._quiet:
            self._execute(self._machine.task_ended(*started))
        elif not ours and ended.error is not None:
            log.error("task failed", extra={"task": ended.name, "error": repr(ended.error)})
        self._answer_quiesced()

    def _answer_quiesced(self) -> None:
        if self._draining and self._epochs.idle:
            for answer in self._draining:
                settle(answer, None)
            self._draining.clear()

    def _execute(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case StartStep(plan=plan):
                    assert self._machine is not None
                    assert self._machine.view is not None
                    assert self._holder.run is not None
                    assert self._holder.link is not None
                    assert self._holder.own_memory is not None
                    self._last_seen = (plan.run_id, plan.step, plan.epoch)
                    self._epochs.begin(
                        self._machine.view,
                        self._holder.run,
                        self._holder.link,
                        self._holder.own_memory,
                        self._holder.governor,
                    )
                case StartTask(task=task, group=group):
                    self._epochs.start(task, group)
                case CommandTask(number=number, task=task, group=group):
                    self._epochs.command(number, task, group)
                case ForgetGroup(group=group):
                    self._epochs.forget(group)
                case EndStep(reason=reason):
                    self._epochs.end(reason)

    def _end_step(self) -> None:
        """Take no part in steps any more, until the next configuration is done."""
        machine, self._machine = self._machine, None
        if machine is not None:
            self._execute(machine.reset())

    # ---------------------------------------------------------------- changes of the run

    def _configure_asked(self, ask: Configure) -> None:
        if self._shutting_down:
            refuse(ask.answer, Unavailable(f"{self.participant} is shutting down"))
            return
        older = self._configuring
        if older is not None and self._holder.joins(older) and older.epoch < ask.epoch:
            # It may wait for processes that have failed in it already.
            self._cancel_configuring(f"epoch {ask.epoch} has begun")
        elif older is not None:
            text = f"{self.participant} is still configuring; ask again"
            refuse(ask.answer, FailedPrecondition(text))
            return
        self._end_step()
        self._phase = RunPhase.CONFIGURING
        self._quiet = False
        self._change(ask)

    @property
    def _configuring(self) -> Configure | None:
        """The configuration under way, or in the queue."""
        waiting = (self._changing, *self._changes)
        return next((change for change in waiting if isinstance(change, Configure)), None)

    def _link_lost(self, message: LinkLost) -> None:
        link = self._holder.link
        if link is None or message.link != link.number:
            return
        link.lose(message.reason)
        # A configuration that runs finds out at its end; a run that is given up is given up.
        if self._phase is RunPhase.READY:
            log.warning("link lost", extra={"reason": message.reason})
            self._give_up_run(message)

    def _release_asked(self, ask: Release) -> None:
        configuring = self._configuring
        if configuring is not None and configuring.run_id == ask.run_id:
            self._cancel_configuring(f"run {ask.run_id} was released")
        elif self._holder.run_id != ask.run_id:
            settle(ask.answer, None)
            return
        self._give_up_run(ask)

    def _shut_down_asked(self, ask: ShutDown) -> None:
        self._shutting_down = self._quiet = True
        self._cancel_configuring(f"{self.participant} is shutting down")
        self._give_up_run(ask)

    def _cancel_configuring(self, reason: str) -> None:
        for ask in [change for change in self._changes if isinstance(change, Configure)]:
            self._changes.remove(ask)
            refuse(ask.answer, Unavailable(reason))
        if isinstance(self._changing, Configure):
            refuse(self._changing.answer, Unavailable(reason))
            self.cancel(_CHANGE)
            asyncio.get_running_loop().call_later(PARTED_AFTER_S, self._part, self._changing)

    def _part(self, change: Configure) -> None:
        """One that was cancelled goes on: it joins ranks of which one has died since it came."""
        if self._changing is change and self._holder.joining:
            self._parted.set()

    def _give_up_run(self, change: Release | LinkLost | ShutDown) -> None:
        self._end_step()
        self._phase = RunPhase.UNCONFIGURED
        self._change(change)

    def _change(self, change: Change) -> None:
        self._stop_checks()
        self._changes.append(change)
        self._next_change()

    def _next_change(self) -> None:
        if self._changing is None and self._changes:
            self._changing = self._changes.popleft()
            if isinstance(self._changing, Configure):
                self._phase = RunPhase.CONFIGURING
            self.spawn(_CHANGE, self._apply(self._changing))

    async def _apply(self, change: Change) -> Prepared | None:
        await self._settled()
        if isinstance(change, Configure):
            return await self._holder.configure(change)
        await self._holder.close()
        return None

    async def _settled(self) -> None:
        """Wait until nothing of an ended epoch runs, nor beside it.

        Of several ranks, for so long only. A checkpoint may take long, but ends on all ranks at the
        same time: none of them has come to be configured before.
        """
        if not self._holder.has_collectives:
            await self._epochs.settled()
            return
        while not self._epochs.idle_beside:
            if self._others_have_come():
                break
            await asyncio.sleep(LOOK_EVERY_S)
        try:
            async with asyncio.timeout(PARTED_AFTER_S):
                await self._epochs.settled()
        except TimeoutError:
            self._parted.set()
            raise

    def _others_have_come(self) -> bool:
        ask = self._configuring
        return ask is not None and self._holder.others_have_come(ask)

    async def parted(self) -> None:
        """Until cancelled. Raises RanksParted once a job waits for ranks that will not come."""
        await self._parted.wait()
        await self._holder.abort()
        raise RanksParted(
            f"{self.participant}: a job or a join went on for {PARTED_AFTER_S:g} s after its epoch "
            "had ended, or after another rank had given it up; it waits for ranks that have left it"
        )

    def _changed(self, ended: TaskEnded) -> None:
        change, self._changing = self._changing, None
        if isinstance(change, Configure):
            self._configured(change, ended.result, ended.error)
        elif change is not None:
            if ended.error is not None:
                log.error("run not given up cleanly", extra={"error": repr(ended.error)})
            if not isinstance(change, LinkLost):
                settle(change.answer, None)
        self._next_change()

    def _configured(self, ask: Configure, prepared: Prepared, error: Exception | None) -> None:
        link, run = self._holder.link, self._holder.run
        if error is None and link is not None and link.lost:
            error = Unavailable(f"the link was lost: {link.lost}")
        if error is None and self._phase is not RunPhase.CONFIGURING:
            error = Unavailable("the run was given up when its configuration had just ended")
        if error is None:
            assert run is not None
            self._fence = ask.epoch
            self._machine = StepMachine(
                run.lanes,
                needs_reference=ask.recipe.needs_reference,
                participant=self.participant,
                place=self._holder.place,
                partners=self._partners,
            )
            self._phase = RunPhase.READY
            settle(ask.answer, prepared)
            return
        log.warning("configuration failed", extra={"error": repr(error)})
        refuse(ask.answer, error)
        self._phase = RunPhase.UNCONFIGURED
        # What it has loaded so far is given up before anything else is tried.
        number = 0 if link is None else link.number
        self._changes.appendleft(LinkLost(link=number, reason="configuration failed"))

    def _link_opened(self, link: Link) -> None:
        self.spawn(f"events {link.number}", self._pump(link))
        self.spawn(f"broker {link.number}", self._watch(link))

    async def _pump(self, link: Link) -> None:
        try:
            async for event in link.events():
                await self.mailbox.put(EventArrived(event=event))
        except RollplexError as error:
            await self.mailbox.put(LinkLost(link=link.number, reason=str(error)))

    async def _watch(self, link: Link) -> None:
        await self.mailbox.put(LinkLost(link=link.number, reason=await link.broken()))

    # ---------------------------------------------------------------- checkpoints, checksums

    def _checkpoint_asked(self, ask: SaveCheckpoint) -> None:
        run, refusal = self._ready_run(ask.run_id), ""
        if run is None:
            refusal = self._not_configured(ask.run_id)
        elif self._epochs.running:
            refusal = "a step is running; checkpoints are written between steps"
        elif self._saving:
            refusal = "a checkpoint is being written; ask again"
        if refusal or run is None:
            refuse(ask.answer, FailedPrecondition(refusal))
            return
        self._saving = True
        self._epochs.beside(CHECKPOINT, self._save_checkpoint(run, ask))

    async def _save_checkpoint(self, run: RunWork, ask: SaveCheckpoint) -> None:
        try:
            await settle_with(ask.answer, run.save_checkpoint(ask.epoch))
        finally:
            self._saving = False

    def _checksums_asked(self, ask: ChecksumWeights) -> None:
        run = self._ready_run(ask.run_id)
        if run is None:
            refuse(ask.answer, FailedPrecondition(self._not_configured(ask.run_id)))
            return
        self._checks = [*(answer for answer in self._checks if not answer.done()), ask.answer]
        self._epochs.beside(CHECKSUMS, self._checksum(run, ask))

    async def _checksum(self, run: RunWork, ask: ChecksumWeights) -> None:
        await settle_with(ask.answer, checksum_weights(run, ask.policy_version))

    def _stop_checks(self) -> None:
        """They may wait for a version that nobody publishes before the run has changed."""
        self._epochs.cancel_beside(CHECKSUMS)
        for answer in self._checks:
            text = f"{self.participant} reads no weights now: its run changes; ask again"
            refuse(answer, FailedPrecondition(text))
        self._checks.clear()

    def _ready_run(self, run_id: RunId) -> RunWork | None:
        ready = self._phase is RunPhase.READY and self._holder.run_id == run_id
        return self._holder.run if ready else None

    def _not_configured(self, run_id: RunId) -> str:
        return f"{self.participant} is not configured for run {run_id}"

    # ---------------------------------------------------------------- for the servicer

    def status(self) -> WorkerStatus:
        """What the worker is doing at this moment."""
        task: Task | None = None
        group: GroupId | None = None
        if self._machine is not None and self._machine.running:
            task, group = self._machine.running[0]
        phase = IDLE if self._phase is RunPhase.READY else self._phase.value
        if self._saving:
            phase = CHECKPOINT
        run_id, step, epoch = self._last_seen or (RunId(""), 0, Epoch(0))
        return WorkerStatus(
            run_id=self._holder.run_id or run_id,
            step=step,
            epoch=epoch,
            phase=phase if task is None else task.value,
            group=group,
            events_seen=self._events_seen,
        )

    async def give_up(self) -> None:
        """Give up whatever `ShutDown` did not get to, and the compute thread. Idempotent.

        Comes after the actor has ended, however it ended.
        """
        if self._given_up:
            return
        self._given_up = True
        self._end_step()
        await asyncio.get_running_loop().run_in_executor(self._compute, lambda: None)
        await self._holder.close()
        self._compute.shutdown(wait=True)
