"""A worker process: its actor, its gRPC servicer, its life under the bootstrap."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from common.gpu.mps import is_client
from common.registry.runs import RunLedger
from common.transport import BoundServicer
from common.worker.actor import WorkerActor
from common.worker.device import WorkerDevice
from common.worker.messages import ShutDown
from common.worker.servicer import WorkerServicer
from protos.rollplex.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from common.service.context import ServiceContext
    from common.worker.work import RunFactory

log = logging.getLogger(__name__)

PHASE_EVERY_S = 0.25


class WorkerService:
    """See `common.service.context.Service` for who calls what, in which order."""

    def __init__(self, context: ServiceContext, factory: RunFactory) -> None:
        """Open the device, which all threads of the loop's executor compute on; in the loop."""
        self._context = context
        self._ledger = RunLedger.of(context.deployment)
        self._device = WorkerDevice.of(context.deployment, context.participant)
        self._device.enter()
        # a thread of another GPU would open a context there
        beside = ThreadPoolExecutor(thread_name_prefix="beside", initializer=self._device.enter)
        asyncio.get_running_loop().set_default_executor(beside)
        self.actor = WorkerActor(
            context.participant,
            context.incarnation,
            context.deployment,
            self._ledger,
            factory,
            self._device,
        )
        self._servicer = WorkerServicer(self.actor, lambda: context.lifecycle.state.value)

    @property
    def servicers(self) -> Sequence[BoundServicer]:
        """The control plane of a worker."""
        return (
            BoundServicer(
                name=worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name,
                servicer=self._servicer,
                add=worker_pb2_grpc.add_WorkerServicer_to_server,
            ),
        )

    async def run(self) -> None:
        """Handle messages until cancelled.

        Raises: a group with DeviceLost when the GPU is lost, with RanksParted when other ranks are;
            at once, while the actor still waits for what cannot end any more.
        """
        work = asyncio.create_task(self._work(), name="work")
        unusable = asyncio.create_task(self._unusable(), name="unusable")
        try:
            await asyncio.wait({work, unusable}, return_when=asyncio.FIRST_COMPLETED)
            if unusable.done():
                await unusable
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait({work})
            raise
        finally:
            unusable.cancel()
        await asyncio.wait({unusable})
        await work

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.actor.run(), name="actor")
            group.create_task(self._report_phase(), name="phase")

    async def _unusable(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._device.watch(), name="device")
            group.create_task(self.actor.parted(), name="ranks")

    async def drain(self) -> None:
        """Abandon the step: its tasks may wait for others that are going away too."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self.actor.mailbox.put(ShutDown(answer=answer))
        await answer
        await self.actor.stop()

    async def close(self) -> None:
        """Give up what `drain` did not get to. Idempotent."""
        await self.actor.give_up()
        await self._ledger.close()

    async def _report_phase(self) -> None:
        while True:
            self._context.set_phase(self.actor.status().phase)
            self._context.set_trouble(self.actor.trouble)
            await asyncio.sleep(PHASE_EVERY_S)


def worker_builder(
    factory: RunFactory,
) -> Callable[[ServiceContext], Awaitable[WorkerService]]:
    """What `run_service` builds a worker with."""

    async def build(context: ServiceContext) -> WorkerService:
        torch.set_num_threads(context.deployment.threads(context.participant))
        if context.deployment.device == "cuda" and not is_client():
            log.warning("not a client of MPS: the services take turns on the GPU")
        return WorkerService(context, factory)

    return build
