"""gRPC `Worker` calls to messages of the actor's mailbox, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from common.config.loading import check
from common.config.recipe import Recipe
from common.ids import Epoch, RunId, WeightsVersion
from common.worker import messages
from protos.rollplex.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.worker.actor import WorkerActor

Context = grpc.aio.ServicerContext


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """The control plane of one worker process."""

    def __init__(self, actor: WorkerActor, lifecycle: Callable[[], str]) -> None:
        self._actor = actor
        self._lifecycle = lifecycle

    async def Configure(  # noqa: N802 - gRPC's name
        self, request: worker_pb2.ConfigureRequest, context: Context[Any, Any]
    ) -> worker_pb2.ConfigureReply:
        """Load a run, or make sure that it is loaded."""
        prepared = await self._ask(
            lambda answer: messages.Configure(
                run_id=RunId(request.run_id),
                epoch=Epoch(request.epoch),
                recipe=check(Recipe, json.loads(request.recipe_json), source="the controller"),
                run_dir=Path(request.run_dir),
                resume_from=Path(request.resume_from) if request.HasField("resume_from") else None,
                answer=answer,
            )
        )
        return worker_pb2.ConfigureReply(
            incarnation=self._actor.incarnation,
            weights_version=prepared.weights_version,
            facts=prepared.facts,
        )

    async def GetStatus(  # noqa: N802
        self, request: worker_pb2.GetStatusRequest, context: Context[Any, Any]
    ) -> worker_pb2.WorkerStatus:
        """What the worker does now; answered while work is running."""
        status = self._actor.status()
        return worker_pb2.WorkerStatus(
            participant=str(self._actor.participant),
            incarnation=self._actor.incarnation,
            pid=os.getpid(),
            lifecycle=self._lifecycle(),
            run_id=status.run_id,
            step=status.step,
            epoch=status.epoch,
            phase=status.phase,
            group=status.group,
            events_seen=status.events_seen,
        )

    async def Quiesce(  # noqa: N802
        self, request: worker_pb2.QuiesceRequest, context: Context[Any, Any]
    ) -> worker_pb2.QuiesceReply:
        """Start nothing more; answers when nothing runs."""
        await self._ask(lambda answer: messages.Quiesce(answer=answer))
        return worker_pb2.QuiesceReply(idle=True)

    async def Release(  # noqa: N802
        self, request: worker_pb2.ReleaseRequest, context: Context[Any, Any]
    ) -> worker_pb2.ReleaseReply:
        """Give up a run."""
        run_id = RunId(request.run_id)
        await self._ask(lambda answer: messages.Release(run_id=run_id, answer=answer))
        return worker_pb2.ReleaseReply()

    async def SaveCheckpoint(  # noqa: N802
        self, request: worker_pb2.SaveCheckpointRequest, context: Context[Any, Any]
    ) -> worker_pb2.SaveCheckpointReply:
        """Write a checkpoint of the version held."""
        path, version = await self._ask(
            lambda answer: messages.SaveCheckpoint(
                run_id=RunId(request.run_id), epoch=Epoch(request.epoch), answer=answer
            )
        )
        return worker_pb2.SaveCheckpointReply(path=str(path), weights_version=version)

    async def ChecksumWeights(  # noqa: N802
        self, request: worker_pb2.ChecksumWeightsRequest, context: Context[Any, Any]
    ) -> worker_pb2.ChecksumWeightsReply:
        """Checksums of the weights that the worker reads."""
        found = await self._ask(
            lambda answer: messages.ChecksumWeights(
                run_id=RunId(request.run_id),
                policy_version=WeightsVersion(request.policy_version),
                answer=answer,
            )
        )
        return worker_pb2.ChecksumWeightsReply(
            roles=[
                worker_pb2.RoleChecksums(
                    role=one.role, version=one.version, checksums=one.checksums
                )
                for one in found
            ]
        )

    async def _ask(self, make: Callable[[asyncio.Future[Any]], messages.Message]) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        await self._actor.mailbox.put(make(answer))
        return await answer
