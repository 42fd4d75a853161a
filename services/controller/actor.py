"""The controller's actor: the queue of runs, one machine a run, and the work of the active one.

What clients see (`feeds`) changes only when it is on disk.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from common.actor import Actor, TaskCancelled, TaskEnded
from common.errors import FailedPrecondition, NotFound, RollplexError, Stale
from common.ids import Participant, Service
from services.controller import instructions as do
from services.controller import messages as got
from services.controller.feed import RunFeed
from services.controller.fleet import PeerFailed
from services.controller.lane import LedgerLane
from services.controller.phase import Phase
from services.controller.ranks import check_ranks
from services.controller.record import RunState
from services.controller.settings import read_recipe, run_settings
from services.controller.state import RunMachine
from services.controller.work import Executor, Writer, now_unix_ms

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from common.config.deployment import Deployment
    from common.ids import RunId
    from services.controller.broker import BrokerPort, Opened
    from services.controller.config import ControllerConfig
    from services.controller.fleet import Fleet, PhaseSeen
    from services.controller.record import History, RunRecord, StepRecord
    from services.controller.store import Store

log = logging.getLogger(__name__)

_MAILBOX_CAPACITY = 65_536
_LANE = "ledger"
_POLL = "poll"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRun:
    """A run that is in the ledger joins the queue."""

    record: RunRecord
    history: History | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A client's command; the answer is the run once the command is on disk."""

    run_id: RunId
    command: got.Command
    answer: asyncio.Future[RunRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """A message for the machine of the active run."""

    run_id: RunId
    message: got.Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A record is on disk."""

    record: RunRecord
    step: StepRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasesSeen:
    """What the workers do."""

    phases: list[PhaseSeen]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """Answered when every message before it is handled."""

    answer: asyncio.Future[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """First message: start the tasks that live as long as the actor."""


Message = Begin | Settle | AddRun | Ask | Tell | Saved | PhasesSeen


class ControllerActor(Actor[Message]):
    """All runs of one cluster; one of them is active."""

    def __init__(
        self,
        *,
        deployment: Deployment,
        store: Store,
        fleet: Fleet,
        broker: BrokerPort,
        config: ControllerConfig,
    ) -> None:
        super().__init__("controller", mailbox_capacity=_MAILBOX_CAPACITY)
        self.feeds: dict[RunId, RunFeed] = {}
        self.phases: list[PhaseSeen] = []
        self._deployment = deployment
        self._store = store
        self._fleet = fleet
        self._broker = broker
        self._config = config
        self._lane = LedgerLane()
        self._writer = Writer(store)
        self._executor = Executor(
            fleet=fleet,
            broker=broker,
            store=store,
            lane=self._lane,
            gather_interval_s=config.gather_interval_s,
            tell=self._tell_active,
            watch=self._watch,
        )
        self._machines: dict[RunId, RunMachine] = {}
        self._active: RunId | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._work_name = ""
        self._watch_name = ""
        self._numbers = itertools.count(1)
        self._requests = itertools.count(1)
        self._checkpoints: dict[int, asyncio.Future[do.AnswerCheckpoint]] = {}
        self.mailbox.offer(Begin())

    async def load(self) -> None:
        """Take up what the ledger holds. Comes before `run`; waits while Redis is away."""
        for record, history in await self._store.load():
            self.feeds[record.run_id] = RunFeed(record)
            if not record.state.ended:
                self.mailbox.offer(AddRun(record=record, history=history))

    async def run(self) -> None:
        """Work on the runs until `stop`."""
        try:
            await super().run()
        finally:
            self._disarm()

    async def handle(self, message: Message | TaskEnded) -> None:
        """Handle one message."""
        match message:
            case Begin():
                self.spawn(_LANE, self._lane.run())
                self.spawn(_POLL, self._poll())
            case Settle():
                if not message.answer.done():
                    message.answer.set_result(None)
            case AddRun():
                self._add(message)
            case Ask():
                self._ask(message)
            case Tell():
                if message.run_id == self._active:
                    self._advance(self._machines[message.run_id], message.message)
            case Saved():
                self._saved(message)
            case PhasesSeen():
                self._phases_seen(message.phases)
            case TaskEnded():
                self._task_ended(message)

    async def ask(self, run_id: RunId, command: got.Command) -> RunRecord:
        """Send a command and wait until it is on disk.

        Raises:
            NotFound: no such run.
            FailedPrecondition: the run's state does not allow it.
        """
        answer: asyncio.Future[RunRecord] = asyncio.get_running_loop().create_future()
        await self.mailbox.put(Ask(run_id=run_id, command=command, answer=answer))
        return await answer

    async def checkpoint(self, run_id: RunId) -> do.AnswerCheckpoint:
        """Have a checkpoint written and wait until it is committed, or is not."""
        request = next(self._requests)
        done: asyncio.Future[do.AnswerCheckpoint] = asyncio.get_running_loop().create_future()
        self._checkpoints[request] = done
        try:
            await self.ask(run_id, got.CheckpointRequested(request=request))
            return await done
        finally:
            self._checkpoints.pop(request, None)

    async def settled(self) -> None:
        """Wait until the messages sent so far are handled, so that `feeds` shows their effect."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self.mailbox.put(Settle(answer=answer))
        await answer

    async def add(self, record: RunRecord) -> None:
        """A run was written to the ledger."""
        await self.mailbox.put(AddRun(record=record))

    def feed(self, run_id: RunId) -> RunFeed:
        """What is known of a run. Raises NotFound."""
        try:
            return self.feeds[run_id]
        except KeyError:
            raise NotFound(
                f"there is no run {run_id}; `rollplex list` shows those that there are"
            ) from None

    def _add(self, message: AddRun) -> None:
        record = message.record
        if record.run_id in self._machines or record.state.ended:
            return
        self.feeds.setdefault(record.run_id, RunFeed(record))
        try:
            recipe = read_recipe(record.recipe_json)
        except RollplexError as error:
            # Written by another version of this program.
            self._give_up(record, f"the recipe cannot be read any more: {error}")
            return
        try:
            check_ranks(recipe, self._deployment)
        except RollplexError as error:
            # Made for other ranks, or before its model was moved.
            self._give_up(record, str(error))
            return
        settings = run_settings(
            recipe,
            train_rows=record.train_rows,
            eval_rows=record.eval_rows,
            place=self._deployment.place(Participant(service=Service.LEARNER)),
            partners=self._deployment.partners,
        )
        self._machines[record.run_id] = RunMachine(
            record, settings, self._config.failures, message.history
        )
        self._start_next()

    def _saved(self, message: Saved) -> None:
        record, feed = message.record, self.feeds[message.record.run_id]
        if record.state is not feed.record.state:
            log.info(
                "state", extra={"run": record.run_id, "is": record.state, "reason": record.reason}
            )
        feed.saved(record, message.step)

    def _give_up(self, record: RunRecord, reason: str) -> None:
        failed = replace(record, state=RunState.FAILED, reason=reason, ended_unix_ms=now_unix_ms())
        self._write(lambda: self._store.save(failed), Saved(record=failed))

    def _start_next(self) -> None:
        if self._active is None and self._machines:
            self._active = next(iter(self._machines))
            machine = self._machines[self._active]
            log.info("run starts", extra={"run": self._active, "at": machine.record.steps_done})
            self._advance(machine, got.Started())
        for run_id in self._machines:
            waits = "" if run_id == self._active else f"waits for run {self._active}"
            self.feeds[run_id].waits_for(waits)

    def _ask(self, message: Ask) -> None:
        machine = self._machines.get(message.run_id)
        if message.answer.done():
            return
        if machine is None:
            message.answer.set_exception(self._no_machine(message.run_id))
            return
        try:
            self._advance(machine, message.command)
        except RollplexError as error:
            message.answer.set_exception(error)
            return
        record = machine.record

        async def answer() -> None:
            if not message.answer.done():
                message.answer.set_result(record)

        self._lane.submit(answer)

    def _no_machine(self, run_id: RunId) -> RollplexError:
        feed = self.feeds.get(run_id)
        if feed is None:
            return NotFound(f"there is no run {run_id}")
        return FailedPrecondition(
            f"run {run_id} has {feed.record.state}; it takes no commands any more"
        )

    def _advance(self, machine: RunMachine, message: got.Message) -> None:
        before = machine.phase
        instructions = machine.handle(message)
        if machine.phase is not before:
            log.debug(
                "phase",
                extra={"run": machine.record.run_id, "from": before, "to": machine.phase},
            )
        for instruction in instructions:
            self._execute(machine, instruction)
        if machine.record.run_id == self._active and machine.phase is Phase.GATHERING:
            self.feeds[self._active].waits_for("; ".join(machine.waiting_for))
        elif machine.record.run_id == self._active:
            self.feeds[self._active].waits_for("")

    def _execute(self, machine: RunMachine, instruction: do.Instruction) -> None:
        run_id = machine.record.run_id
        match instruction:
            case do.SaveRun(record=record):
                self._write(lambda: self._store.save(record), Saved(record=record))
            case do.RewindRun(version=version):
                self._write(lambda: self._store.rewound(run_id, version))
            case do.ArmDeadline():
                self._arm(run_id, instruction)
            case do.DisarmDeadline():
                if run_id == self._active:
                    self._disarm()
            case do.Note(text=text):
                log.info("note", extra={"run": run_id, "text": text})
                self.feeds[run_id].note(text)
            case do.AnswerCheckpoint():
                self._answer_checkpoint(instruction)
            case do.RunOver():
                self._run_over(instruction)
            case do.TakeEpoch():
                self._tell_written(run_id, lambda: self._writer.take_epoch(instruction))
            case do.CommitStep():
                saved = Saved(record=instruction.record, step=instruction.step)
                self._tell_written(run_id, lambda: self._writer.commit(instruction), saved)
            case do.AdoptSteps():
                record = machine.record
                self._tell_written(run_id, lambda: self._writer.adopt(instruction, record))
            case _:
                self._replace_work(instruction)

    def _write(self, write: Callable[[], Awaitable[Any]], saved: Saved | None = None) -> None:
        async def do_it() -> None:
            await write()
            if saved is not None:
                self.mailbox.offer(saved)

        self._lane.submit(do_it)

    def _tell_written(
        self,
        run_id: RunId,
        write: Callable[[], Awaitable[got.Message]],
        saved: Saved | None = None,
    ) -> None:
        self._cancel_work()

        async def do_it() -> None:
            message = await write()
            if saved is not None:
                self.mailbox.offer(saved)
            self.mailbox.offer(Tell(run_id=run_id, message=message))

        self._lane.submit(do_it)

    def _replace_work(self, work: do.Work) -> None:
        self._cancel_work()
        self._work_name = f"work {next(self._numbers)} {type(work).__name__}"
        self.spawn(self._work_name, self._executor.run(work))

    def _cancel_work(self) -> None:
        if self._work_name:
            self.cancel(self._work_name)
        self._work_name = ""

    def _task_ended(self, ended: TaskEnded) -> None:
        if isinstance(ended.error, TaskCancelled):
            return
        if isinstance(ended.error, Stale) and ended.name == _LANE:
            log.error("another controller has taken over", extra={"cause": str(ended.error)})
        if ended.error is not None:
            raise ended.error
        if ended.name == self._work_name and self._active is not None:
            self._work_name = ""
            self._advance(self._machines[self._active], ended.result)

    def _run_over(self, instruction: do.RunOver) -> None:
        run_id = instruction.run_id
        log.info("run over", extra={"run": run_id, "outcome": instruction.outcome})
        del self._machines[run_id]
        if run_id != self._active:
            return
        self._cancel_work()
        self._disarm()
        if self._watch_name:
            self.cancel(self._watch_name)
            self._watch_name = ""
        self._active = None
        self.phases = []
        self._start_next()

    def _answer_checkpoint(self, answer: do.AnswerCheckpoint) -> None:
        for request in answer.requests:
            done = self._checkpoints.get(request)
            if done is not None and not done.done():
                done.set_result(answer)

    def _arm(self, run_id: RunId, instruction: do.ArmDeadline) -> None:
        self._disarm()
        self._timer = asyncio.get_running_loop().call_later(
            instruction.seconds,
            lambda: self.mailbox.offer(
                Tell(run_id=run_id, message=got.DeadlinePassed(ticket=instruction.ticket))
            ),
        )

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell_active(self, message: got.Message) -> None:
        if self._active is not None:
            self.mailbox.offer(Tell(run_id=self._active, message=message))

    def _watch(self, opened: Opened) -> None:
        if self._watch_name:
            self.cancel(self._watch_name)
        self._watch_name = f"watch {next(self._numbers)}"
        assert self._active is not None
        self.spawn(self._watch_name, self._pump(self._watch_name, self._active, opened))

    async def _pump(self, name: str, run_id: RunId, opened: Opened) -> None:
        reason = "the event stream of the broker ended"
        try:
            async for event in self._broker.watch(opened):
                seen = got.NodeEvent(event=event, received_ns=time.monotonic_ns())
                await self.mailbox.put(Tell(run_id=run_id, message=seen))
        except PeerFailed as error:
            reason = str(error)
        if name == self._watch_name:
            await self.mailbox.put(
                Tell(run_id=run_id, message=got.BrokerLost(reason=f"broker lost: {reason}"))
            )

    async def _poll(self) -> None:
        while True:
            if self._active is not None:
                try:
                    phases = await self._fleet.phases()
                except RollplexError as error:
                    log.debug("no look at the workers", extra={"cause": str(error)})
                else:
                    await self.mailbox.put(PhasesSeen(phases=phases))
            await asyncio.sleep(self._config.status_interval_s)

    def _phases_seen(self, phases: list[PhaseSeen]) -> None:
        if self._active is not None:
            self.phases = phases
            self.feeds[self._active].phases(phases)
