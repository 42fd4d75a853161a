"""The broker's control plane: gRPC to the actor's orders, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.errors import InvalidArgument, Stale
from common.events import event_to_proto
from common.ids import Epoch, RunId
from common.step.plan import StepPlan
from protos.rollplex.v1 import broker_pb2 as pb
from protos.rollplex.v1 import broker_pb2_grpc
from services.broker.translate import ledger_to_proto

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from common.bus.hub import Hub
    from services.broker.actor import BrokerActor


class BrokerServicer(broker_pb2_grpc.BrokerServicer):
    """See protos/rollplex/v1/broker.proto."""

    def __init__(self, actor: BrokerActor, hub: Hub) -> None:
        self._actor = actor
        self._hub = hub

    async def OpenRun(self, request: pb.OpenRunRequest, context: Any) -> pb.OpenRunReply:
        """Make a run known."""
        if not request.run_id:
            raise InvalidArgument("run_id is empty; a run needs a name")
        self._actor.open_run(RunId(request.run_id), Epoch(request.epoch))
        return pb.OpenRunReply(hub_incarnation=self._hub.incarnation, head_seq=self._hub.head_seq)

    async def BeginStep(self, request: pb.BeginStepRequest, context: Any) -> pb.BeginStepReply:
        """Raise the fence and publish the plan."""
        try:
            plan = StepPlan.from_proto(request.plan)
        except (ValueError, KeyError) as error:
            raise InvalidArgument(
                f"the plan of step {request.plan.step} of run {request.plan.run_id} is not "
                f"readable: {error!r}"
            ) from error
        seq = self._actor.begin_step(plan)
        return pb.BeginStepReply(seq=seq, hub_incarnation=self._hub.incarnation)

    async def AbortStep(self, request: pb.AbortStepRequest, context: Any) -> pb.AbortStepReply:
        """End an epoch without an update."""
        self._actor.abort_step(RunId(request.run_id), Epoch(request.epoch), request.reason)
        return pb.AbortStepReply()

    async def CloseRun(self, request: pb.CloseRunRequest, context: Any) -> pb.CloseRunReply:
        """Free everything of a run."""
        return pb.CloseRunReply(freed_bytes=self._actor.close_run(RunId(request.run_id)))

    async def GetLedger(self, request: pb.GetLedgerRequest, context: Any) -> pb.Ledger:
        """Who holds how many bytes until when."""
        run_id = RunId(request.run_id) if request.HasField("run_id") else None
        return ledger_to_proto(self._actor.ledger(run_id), device=self._actor.device)

    async def WatchEvents(
        self, request: pb.WatchEventsRequest, context: Any
    ) -> AsyncIterator[pb.WatchedEvent]:
        """The node's events after a number, live; without an incarnation: from the newest plan."""
        after_seq: int | None = request.after_seq
        if not request.hub_incarnation:
            after_seq = None
        elif request.hub_incarnation != self._hub.incarnation:
            raise Stale(
                f"event {request.after_seq} was of hub {request.hub_incarnation}, which is gone; "
                f"this one is {self._hub.incarnation}: open the run again"
            )
        async for event in self._hub.subscribe(after_seq):
            yield pb.WatchedEvent(
                hub_incarnation=self._hub.incarnation, event=event_to_proto(event)
            )
