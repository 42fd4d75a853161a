"""Runs the machine's instructions: each piece of work ends in exactly one message."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import NotFound, RollplexError, Stale, Unavailable
from common.ids import Epoch, StepIndex, WeightsVersion
from common.step.plan import StepMode
from services.controller import instructions as do
from services.controller import messages as got
from services.controller.files import append_step, read_steps
from services.controller.fleet import PeerFailed
from services.controller.record import StepRecord
from services.controller.verdict import code_of, is_retryable

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.ids import RunId
    from services.controller.broker import BrokerPort, Opened
    from services.controller.fleet import Fleet
    from services.controller.lane import LedgerLane
    from services.controller.record import RunRecord
    from services.controller.store import Store

log = logging.getLogger(__name__)


class Executor:
    """Does one instruction at a time for the active run; safe to cancel at any await."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        broker: BrokerPort,
        store: Store,
        lane: LedgerLane,
        gather_interval_s: float,
        tell: Callable[[got.Message], None],
        watch: Callable[[Opened], None],
    ) -> None:
        """Args:
        tell: sends the machine a message that ends no work.
        watch: replaces the watched event stream of the broker.
        """
        self._fleet = fleet
        self._broker = broker
        self._store = store
        self._lane = lane
        self._gather_interval_s = gather_interval_s
        self._tell = tell
        self._watch = watch

    async def run(self, instruction: do.Work) -> got.Message:
        """Do it, once everything that was saved before it is on disk."""
        await self._lane.flushed()
        try:
            return await self._dispatch(instruction)
        except PeerFailed as error:
            return _failed(instruction, error.what, error.cause)
        except RollplexError as error:
            return _failed(instruction, type(instruction).__name__, error)

    async def _dispatch(self, instruction: do.Work) -> got.Message:
        match instruction:
            case do.GatherServices():
                return await self._gather(instruction)
            case do.ConfigureWorkers():
                return await self._configure(instruction)
            case do.BeginStep():
                return await self._begin(instruction)
            case do.AbortStep():
                return await self._abort(instruction)
            case do.SaveCheckpoint():
                reply = await self._fleet.save_checkpoint(instruction.run_id, instruction.epoch)
                return got.CheckpointSaved(
                    ticket=instruction.ticket,
                    path=reply.path,
                    weights_version=WeightsVersion(reply.weights_version),
                )
            case do.CloseRun():
                return await self._close(instruction)
            case do.TakeEpoch() | do.CommitStep() | do.AdoptSteps():
                raise AssertionError(f"{type(instruction).__name__} is a write to the ledger")

    async def _gather(self, instruction: do.GatherServices) -> got.Message:
        await asyncio.sleep(instruction.delay_s)
        while True:
            try:
                missing = await self._fleet.missing()
            except Unavailable as error:
                log.debug("the registry is away", extra={"cause": str(error)})
                self._tell(got.ServicesMissing(ticket=instruction.ticket, registry_away=True))
            else:
                if not missing:
                    return got.ServicesReady(ticket=instruction.ticket)
                self._tell(got.ServicesMissing(ticket=instruction.ticket, waiting_for=missing))
            await asyncio.sleep(self._gather_interval_s)

    async def _configure(self, instruction: do.ConfigureWorkers) -> got.Message:
        run_id = instruction.record.run_id
        if instruction.previous_epoch:
            await self._end_epoch(run_id, instruction.previous_epoch)
        opened = await self._broker.open_run(run_id, instruction.epoch)
        self._watch(opened)
        configured = await self._fleet.configure(instruction.record, instruction.epoch)
        return got.WorkersConfigured(
            ticket=instruction.ticket,
            weights_version=configured.weights_version,
            incarnations=configured.incarnations,
            facts=configured.facts,
        )

    async def _end_epoch(self, run_id: RunId, epoch: Epoch) -> None:
        """Workers may still be busy with it, as after a restart of the controller."""
        try:
            await self._broker.abort(run_id, epoch, "begun again")
        except PeerFailed as error:
            # A broker that has restarted knows neither the run nor its epochs.
            if not isinstance(error.cause, NotFound | Stale):
                raise

    async def _begin(self, instruction: do.BeginStep) -> got.Message:
        plan = instruction.plan
        self._lane.submit(lambda: self._store.begun(plan))
        await self._lane.flushed()
        await self._broker.begin(plan)
        return got.StepBegun(ticket=instruction.ticket)

    async def _abort(self, instruction: do.AbortStep) -> got.Message:
        if instruction.broker_alive:
            try:
                await self._broker.abort(instruction.run_id, instruction.epoch, instruction.reason)
            except PeerFailed as error:
                log.warning("the broker did not end the epoch", extra={"cause": str(error)})
        self._lane.submit(
            lambda: self._store.aborted(
                instruction.run_id, instruction.step, instruction.epoch, instruction.reason
            )
        )
        await self._lane.flushed()
        return got.StepAbandoned(ticket=instruction.ticket)

    async def _close(self, instruction: do.CloseRun) -> got.Message:
        run_id = instruction.run_id
        if instruction.epoch:
            problems = []
            try:
                await self._broker.abort(run_id, instruction.epoch, instruction.reason)
            except PeerFailed as error:
                problems.append(str(error))
            problems += await self._fleet.release(run_id)
            try:
                await self._broker.close_run(run_id)
            except PeerFailed as error:
                problems.append(str(error))
            for problem in problems:
                log.warning("could not be told of the run's end", extra={"cause": problem})
        return got.RunClosed(ticket=instruction.ticket, now_unix_ms=now_unix_ms())


class Writer:
    """Does the instructions that are writes to the ledger; never cancelled."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def take_epoch(self, instruction: do.TakeEpoch) -> got.Message:
        """Take the run's next epoch."""
        epoch = await self._store.next_epoch(instruction.run_id)
        return got.EpochTaken(ticket=instruction.ticket, epoch=epoch)

    async def commit(self, instruction: do.CommitStep) -> got.Message:
        """Files first: a line without a journal entry is superseded, the reverse would be a gap."""
        run_dir = Path(instruction.record.run_dir)
        await asyncio.to_thread(append_step, run_dir, instruction.step, instruction.spans)
        await self._store.committed(instruction.record.run_id, instruction.step)
        await self._store.save(instruction.record)
        return got.StepCommitted(ticket=instruction.ticket)

    async def adopt(self, instruction: do.AdoptSteps, record: RunRecord) -> got.Message:
        """Commit steps whose update is durable, with the best metrics that there are of them."""
        run_dir = Path(record.run_dir)
        written = {step.step: step for step in read_steps(run_dir) if step.mode is StepMode.TRAIN}
        metrics: dict[str, float] = {}
        for index in range(instruction.first_step, instruction.version):
            step = written.get(StepIndex(index))
            if step is None:
                durable = await self._store.durable_metrics(instruction.run_id, index + 1)
                step = StepRecord(
                    step=StepIndex(index),
                    epoch=Epoch(instruction.epoch),
                    mode=StepMode.TRAIN,
                    weights_version=WeightsVersion(index + 1),
                    wall_s=0.0,
                    metrics={**durable, "adopted": 1.0},
                )
                await asyncio.to_thread(append_step, run_dir, step, ())
            await self._store.committed(instruction.run_id, step)
            metrics = dict(step.metrics)
        return got.StepsAdopted(ticket=instruction.ticket, metrics=metrics)


def now_unix_ms() -> int:
    """The wall clock, for people."""
    return time.time_ns() // 1_000_000


def _failed(instruction: do.Work, what: str, error: RollplexError) -> got.WorkFailed:
    return got.WorkFailed(
        ticket=instruction.ticket,
        what=what,
        code=code_of(error),
        message=str(error),
        retryable=is_retryable(error),
    )
