"""A worker's actor in this process, on a real broker; its run is the test's own."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from common.errors import FailedPrecondition
from common.events import event_from_proto
from common.ids import Epoch, GroupId, Incarnation, Participant, RunId, Service, WeightsVersion
from common.step.machine import Lane
from common.step.plan import PlannedGroup, StepMode, StepPlan
from common.step.schedule import Schedule
from common.step.tasks import Task
from common.worker.actor import WorkerActor
from common.worker.device import WorkerDevice
from common.worker.messages import (
    ChecksumWeights,
    Configure,
    Quiesce,
    Release,
    SaveCheckpoint,
    ShutDown,
)
from common.worker.work import Prepared
from protos.rollplex.v1 import broker_pb2 as pb
from tests.integration.broker.conftest import broker, mortal_broker, started
from tests.integration.runs.recipes import recipe

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from common.events import Event, bodies
    from common.worker.context import RunContext
    from common.worker.scope import StepScope
    from common.worker.work import ReadWeights
    from tests.integration.broker.conftest import Broker

__all__ = ["broker", "mortal_broker", "started"]

ENCODER = Participant(service=Service.PREFIX_ENCODER)
RUN = RunId("run")
GROUPS = 3
SOON_S = 10.0
CPU = WorkerDevice(torch=torch.device("cpu"), uuid="")


def step_plan(epoch: int, *, groups: int = GROUPS, ahead: int = 0) -> StepPlan:
    return StepPlan(
        run_id=RUN,
        step=0,
        epoch=Epoch(epoch),
        mode=StepMode.EVAL,
        schedule=Schedule.SERIAL,
        weights_version=WeightsVersion(0),
        groups=_planned(groups),
        samples_per_group=1,
        ahead=_planned(ahead),
    )


def _planned(groups: int) -> tuple[PlannedGroup, ...]:
    return tuple(PlannedGroup(group=GroupId(g), split="eval", sample=g) for g in range(groups))


@dataclass
class Script:
    """What the run of the test does, and what was done to it."""

    work: Callable[[StepScope, GroupId], Any] | None = None
    """Awaited by the task of a group; None: the task ends at once."""
    begin: Callable[[StepScope], None] = lambda scope: None
    load: Callable[[RunContext], Any] | None = None
    prepare: Callable[[], Any] | None = None
    save: Callable[[], Any] | None = None
    weights: tuple[ReadWeights, ...] = ()
    told: list[str] = field(default_factory=list)
    scopes: list[StepScope] = field(default_factory=list)

    @property
    def changes(self) -> list[str]:
        """How the run was loaded and given up."""
        return [what for what in self.told if what in ("load", "prepare", "close")]

    async def __call__(self, context: RunContext) -> ScriptedRun:
        self.told.append("load")
        if self.load is not None:
            await self.load(context)
        return ScriptedRun(self)


class ScriptedRun:
    """A `RunWork`."""

    keeps_cache = False
    trouble = ""
    lanes = (Lane(name="data", tasks=(Task.PREPARE, Task.AHEAD_PREPARE), width=2),)

    def __init__(self, script: Script) -> None:
        self._script = script

    async def prepare(self) -> Prepared:
        self._script.told.append("prepare")
        if self._script.prepare is not None:
            await self._script.prepare()
        return Prepared(weights_version=WeightsVersion(0))

    def begin(self, scope: StepScope) -> ScriptedStep:
        self._script.scopes.append(scope)
        self._script.begin(scope)
        return ScriptedStep(self._script, scope)

    def read_weights(self) -> tuple[ReadWeights, ...]:
        return self._script.weights

    async def save_checkpoint(self, epoch: Epoch) -> tuple[Path, WeightsVersion]:
        if self._script.save is None:
            raise FailedPrecondition("nothing to save")
        await self._script.save()
        return Path("saved"), WeightsVersion(0)

    async def close(self) -> None:
        self._script.told.append("close")


class ScriptedStep:
    """A `StepWork`."""

    def __init__(self, script: Script, scope: StepScope) -> None:
        self._script = script
        self._scope = scope

    async def run(self, task: Task, group: GroupId | None, cause_id: str) -> None:
        assert group is not None
        self._script.told.append(f"{task} {group} of {self._scope.plan.epoch}")
        if self._script.work is not None:
            await self._script.work(self._scope, group)

    def forget(self, group: GroupId) -> None:
        self._script.told.append(f"forget {group}")

    async def advance(self) -> None:
        pass

    def close(self) -> None:
        self._script.told.append(f"end {self._scope.plan.epoch}")


class Worker:
    """An actor that runs, and how to ask it."""

    def __init__(self, actor: WorkerActor, script: Script, broker: Broker) -> None:
        self.actor = actor
        self.script = script
        self.broker = broker
        self.life: asyncio.Task[None] | None = None

    def asks(self, make: Any, **values: Any) -> asyncio.Future[Any]:
        """Send an ask; the future is its answer."""
        answer = asyncio.get_running_loop().create_future()
        self.actor.mailbox.offer(make(answer=answer, **values))
        return answer

    def configure(self, run_id: str = RUN, *, epoch: int = 1) -> asyncio.Future[Prepared]:
        return self.asks(
            Configure,
            run_id=RunId(run_id),
            epoch=Epoch(epoch),
            recipe=recipe(Path("model")),
            run_dir=Path("runs"),
            resume_from=None,
        )

    def release(self, run_id: str = RUN) -> asyncio.Future[None]:
        return self.asks(Release, run_id=RunId(run_id))

    def quiesce(self) -> asyncio.Future[None]:
        return self.asks(Quiesce)

    def shut_down(self) -> asyncio.Future[None]:
        return self.asks(ShutDown)

    def save(self) -> asyncio.Future[Any]:
        return self.asks(SaveCheckpoint, run_id=RUN, epoch=Epoch(1))

    def checksums(self, run_id: str = RUN) -> asyncio.Future[Any]:
        version = WeightsVersion(0)
        return self.asks(ChecksumWeights, run_id=RunId(run_id), policy_version=version)

    async def begin(self, epoch: int, *, groups: int = GROUPS, ahead: int = 0) -> None:
        plan = step_plan(epoch, groups=groups, ahead=ahead).to_proto()
        await self.broker.stub.BeginStep(pb.BeginStepRequest(plan=plan))

    async def abort(self, epoch: int) -> None:
        request = pb.AbortStepRequest(run_id=RUN, epoch=epoch, reason="the test says so")
        await self.broker.stub.AbortStep(request)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON_S):
            while not holds():
                assert self.life is not None
                assert not self.life.done() or self.life.exception() is None, self.life.exception()
                await asyncio.sleep(0.005)

    async def told(self, what: str) -> None:
        """Wait until the run was told this."""
        await self.until(lambda: what in self.script.told)

    async def event(self, kind: type[bodies.Body]) -> Event:
        """The first event of a kind in the newest epoch."""
        async with asyncio.timeout(SOON_S):
            async for seen in self.broker.stub.WatchEvents(pb.WatchEventsRequest()):
                event = event_from_proto(seen.event)
                if isinstance(event.body, kind):
                    return event
        raise AssertionError(kind)


@asynccontextmanager
async def running(broker: Broker, script: Script, *, ranks: int = 1) -> AsyncIterator[Worker]:
    deployment = broker.deployment.model_copy(update={"train_tp": ranks, "rollout_tp": ranks})
    actor = WorkerActor(ENCODER, Incarnation("unit"), deployment, None, script, CPU)
    worker = Worker(actor, script, broker)
    worker.life = asyncio.create_task(actor.run())
    try:
        yield worker
    finally:
        if not worker.life.done():
            async with asyncio.timeout(SOON_S):
                await worker.shut_down()
            await actor.stop()
        await actor.give_up()
        await worker.life


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
async def worker(broker: Broker, script: Script) -> AsyncIterator[Worker]:
    async with running(broker, script) as worker:
        yield worker
