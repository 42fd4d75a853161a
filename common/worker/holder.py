"""The run that a worker holds, with its link to the broker: loaded, made ready, given up.

One change at a time: the actor runs `configure` and `close` one after the other.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from common.governor.table import H200, load_table
from common.ids import Service
from common.step.schedule import OWN_WEIGHTS
from common.worker.context import RunContext
from common.worker.governor import Governor
from common.worker.link import Link, LinkDown
from common.worker.live_decode import BACKGROUND
from common.worker.own_memory import OwnMemory
from common.worker.push_link import PUSHERS, PushLink
from common.worker.ranks import Ranks, others_present, present
from common.worker.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from common.config.deployment import Deployment
    from common.ids import Incarnation, Participant, RunId
    from common.registry.runs import RunLedger
    from common.step.place import Place
    from common.worker.device import WorkerDevice
    from common.worker.messages import Configure
    from common.worker.work import Prepared, RunFactory, RunWork


ABORT_S = 2.0
"""Longest wait for kernels to end."""


class RunHolder:
    """At most one run."""

    def __init__(
        self,
        participant: Participant,
        incarnation: Incarnation,
        deployment: Deployment,
        ledger: RunLedger,
        factory: RunFactory,
        device: WorkerDevice,
        *,
        opened: Callable[[Link], None],
    ) -> None:
        """Args: opened: told of each new link."""
        self._participant = participant
        self._incarnation = incarnation
        self._deployment = deployment
        self.place = deployment.place(participant)
        self._ledger = ledger
        self._factory = factory
        self._device = device
        self._opened = opened
        self.link: Link | None = None
        self.own_memory: OwnMemory | None = None
        self.context: RunContext | None = None
        self.run: RunWork | None = None
        self.governor: Governor | None = None
        self.joining = False
        """Whether it waits for ranks that have come, and cannot be cancelled."""

    @property
    def run_id(self) -> RunId | None:
        """Which run is held, or being loaded."""
        return None if self.context is None else self.context.run_id

    async def configure(self, ask: Configure) -> Prepared:
        """Load the run if it is not, and make sure that a step can begin.

        Raises: LinkDown if the link was lost meanwhile; RollplexError for what cannot be loaded.
            In both cases `close` has to follow.
        """
        if self.run is None or self.run_id != ask.run_id or self.link is None or self.link.lost:
            await self.close()
            self.link = await Link.open(
                self._deployment,
                self._participant,
                self._incarnation,
                device=self._device.uuid,
            )
            self._opened(self.link)
            self.own_memory = OwnMemory(self.link.broker, self._device)
            self.run = await self._load(ask, self.link)
        elif self.joins(ask):
            # It is bound to the communicators of the processes that there were.
            await self._give_up_run()
            self.run = await self._load(ask, self.link)
        prepared = await self.run.prepare()
        if self.own_memory is not None:
            self.own_memory.look()
        if self.link.lost:
            raise LinkDown(self.link.lost)
        return prepared

    async def _load(self, ask: Configure, link: Link) -> RunWork:
        joined = await self._join(ask) if self.has_collectives else None
        try:
            push = await self._join_push(ask) if self._pushes(ask) else None
        except BaseException:
            if joined is not None:
                joined.leave()
            raise
        self.context = RunContext(
            run_id=ask.run_id,
            recipe=ask.recipe,
            run_dir=ask.run_dir,
            participant=self._participant,
            device=self._device.torch,
            broker=link.broker,
            ledger=self._ledger,
            resume_from=ask.resume_from,
            engine_python=self._deployment.engine_python,
            governed=self._deployment.governed,
            place=self.place,
            joined=joined,
            partners=self._deployment.partners,
            push=push,
        )
        if self.context.governed and self._participant.service in BACKGROUND:
            self.governor = await _governor(self.context, self._deployment.governor_table)
        return await self._factory(self.context)

    @property
    def has_collectives(self) -> bool:
        """Whether there are ranks that it has collectives with."""
        return self._joining.world > 1

    def joins(self, ask: Configure) -> bool:
        """Whether it waits for other processes in `configure`, and makes communicators anew."""
        return self.has_collectives or self._pushes(ask)

    def _pushes(self, ask: Configure) -> bool:
        pushed = ask.recipe.training.schedule in OWN_WEIGHTS
        return pushed and self._participant.service in PUSHERS

    def others_have_come(self, ask: Configure) -> bool:
        """Whether another rank waits in `configure` for this one: it has no job left."""
        place = self._joining
        return others_present(self._rendezvous(ask), rank=place.rank, degree=place.world)

    @property
    def _joining(self) -> Place:
        """Its place among those: replicas meet in the update, which is the learner's."""
        meets = self._participant.service is Service.LEARNER
        return self.place if meets else self.place.in_replica

    def _rendezvous(self, ask: Configure) -> Path:
        first = self.place.rank - self._joining.rank
        name = f"{self._participant.service}-{first}-{ask.run_id}-{ask.epoch}.ranks"
        return self._deployment.socket_dir / name

    async def _join(self, ask: Configure) -> Ranks:
        place, rendezvous = self._joining, self._rendezvous(ask)
        async with present(rendezvous, rank=place.rank, degree=place.world):
            self.joining = True
            try:
                return await in_thread(
                    lambda: Ranks.join(
                        rendezvous,
                        place=place,
                        device=self._device.torch,
                        collective_timeout_s=ask.recipe.training.step_deadline_s,
                    ),
                    unwanted=Ranks.leave,
                )
            finally:
                self.joining = False

    async def _join_push(self, ask: Configure) -> PushLink:
        rank = PUSHERS.index(self._participant.service)
        name = f"push{self._participant.rank}-{ask.run_id}-{ask.epoch}.ranks"
        rendezvous = self._deployment.socket_dir / name
        async with present(rendezvous, rank=rank, degree=len(PUSHERS)):
            return await in_thread(
                lambda: PushLink.join(
                    rendezvous,
                    rank=rank,
                    device=self._device.torch,
                    bucket_bytes=int(ask.recipe.training.push_bucket_mib * 2**20),
                    timeout_s=ask.recipe.training.step_deadline_s,
                ),
                unwanted=PushLink.close,
            )

    async def abort(self) -> None:
        """Leave no kernel on the GPU that waits for other ranks: the process ends after this."""
        if self.context is not None:
            aborting = asyncio.ensure_future(asyncio.to_thread(self.context.abort))
            await asyncio.wait({aborting}, timeout=ABORT_S)

    async def _give_up_run(self) -> None:
        run, context, governor = self.run, self.context, self.governor
        self.run = self.context = self.governor = None
        try:
            if run is not None:
                await run.close()
        finally:
            if governor is not None:
                governor.close()
            if context is not None:
                await in_thread(context.leave)

    async def close(self) -> None:
        """Give up run and link, and what the run has left in the device's cache. Idempotent."""
        link = self.link
        self.link = self.own_memory = None
        try:
            await self._give_up_run()
        finally:
            if link is not None:
                await in_thread(self._device.give_back)
                await link.close()


async def _governor(context: RunContext, table: Path | None) -> Governor:
    if table is None:
        return await Governor.open(context, H200)
    return await Governor.open(context, load_table(table), fixed=True)
