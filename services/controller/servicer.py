"""The public gRPC API: requests to messages of the actor, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.errors import FailedPrecondition, InvalidArgument
from common.ids import RunId
from protos.rollplex.v1 import control_pb2 as pb
from protos.rollplex.v1 import control_pb2_grpc
from services.controller import messages as got
from services.controller.convert import entry_to_proto
from services.controller.work import now_unix_ms

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.controller.actor import ControllerActor
    from services.controller.admission import Admission
    from services.controller.fleet import Fleet
    from services.controller.store import Store

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Control"].full_name


class ControlServicer(control_pb2_grpc.ControlServicer):
    """Holds no state of its own."""

    def __init__(
        self, actor: ControllerActor, admission: Admission, store: Store, fleet: Fleet
    ) -> None:
        self._actor = actor
        self._admission = admission
        self._store = store
        self._fleet = fleet

    async def CreateRun(self, request: pb.CreateRunRequest, context: Any) -> pb.Run:
        """Check everything, write the run down, queue it."""
        request_id = request.request_id if request.HasField("request_id") else None
        for feed in self._actor.feeds.values():
            if request_id and feed.record.request_id == request_id:
                return feed.run
        record = await self._admission.admit(
            request.recipe_json,
            run_dir=request.run_dir if request.HasField("run_dir") else None,
            resume_from=request.resume_from if request.HasField("resume_from") else None,
            request_id=request_id,
        )
        record = await self._store.create(record)
        await self._actor.add(record)
        return await self._current(record.run_id)

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.Run:
        """The run as it is on disk."""
        return self._actor.feed(RunId(request.run_id)).run

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsReply:
        """All runs, oldest first."""
        runs = [feed.run for feed in self._actor.feeds.values()]
        return pb.ListRunsReply(runs=sorted(runs, key=lambda run: run.created_unix_ms))

    async def WatchRun(
        self, request: pb.WatchRunRequest, context: Any
    ) -> AsyncIterator[pb.RunUpdate]:
        """The latest state at once, then every change that the watcher is quick enough for."""
        async for update in self._actor.feed(RunId(request.run_id)).watch():
            yield update

    async def PauseRun(self, request: pb.PauseRunRequest, context: Any) -> pb.Run:
        """Pause after the running step."""
        return await self._ask(request.run_id, got.PauseRequested())

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: Any) -> pb.Run:
        """Go on."""
        return await self._ask(request.run_id, got.ResumeRequested())

    async def StopRun(self, request: pb.StopRunRequest, context: Any) -> pb.Run:
        """End the run."""
        command = got.StopRequested(after_step=request.after_step, now_unix_ms=now_unix_ms())
        return await self._ask(request.run_id, command)

    async def SaveCheckpoint(
        self, request: pb.SaveRunCheckpointRequest, context: Any
    ) -> pb.Checkpoint:
        """Write a checkpoint between two steps."""
        answer = await self._actor.checkpoint(RunId(request.run_id))
        if answer.error:
            raise FailedPrecondition(f"no checkpoint of run {request.run_id}: {answer.error}")
        return pb.Checkpoint(path=answer.path, weights_version=answer.weights_version)

    async def GetCluster(self, request: pb.GetClusterRequest, context: Any) -> pb.Cluster:
        """Who is registered, and what the workers do."""
        phases = {seen.participant: seen.phase for seen in self._actor.phases}
        entries = await self._fleet.entries()
        return pb.Cluster(
            services=[entry_to_proto(e, phases.get(e.participant, "")) for e in entries]
        )

    async def _ask(self, run_id: str, command: got.Command) -> pb.Run:
        if not run_id:
            raise InvalidArgument("run_id is empty; `rollplex list` shows the runs")
        await self._actor.ask(RunId(run_id), command)
        return await self._current(RunId(run_id))

    async def _current(self, run_id: RunId) -> pb.Run:
        await self._actor.settled()
        return self._actor.feed(run_id).run
