"""The broker's control plane, as the controller calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from common.errors import RollplexError
from common.events import Event, event_from_proto
from protos.rollplex.v1 import broker_pb2 as pb
from services.controller.fleet import Fleet, PeerFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from common.ids import Epoch, RunId
    from common.step.plan import StepPlan
    from protos.rollplex.v1.broker_pb2_grpc import BrokerAsyncStub

Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Where the node's order stood when the run was opened."""

    hub_incarnation: str
    head_seq: int


class BrokerPort:
    """Calls raise `PeerFailed`."""

    def __init__(self, fleet: Fleet, *, call_deadline_s: float) -> None:
        self._fleet = fleet
        self._deadline_s = call_deadline_s

    async def open_run(self, run_id: RunId, epoch: Epoch) -> Opened:
        """Make the run known."""
        request = pb.OpenRunRequest(run_id=run_id, epoch=epoch)
        reply = await self._call(
            "open", lambda stub: stub.OpenRun(request, timeout=self._deadline_s)
        )
        return Opened(hub_incarnation=reply.hub_incarnation, head_seq=reply.head_seq)

    async def begin(self, plan: StepPlan) -> None:
        """Raise the fence and publish StepBegan."""
        request = pb.BeginStepRequest(plan=plan.to_proto())
        await self._call("begin", lambda stub: stub.BeginStep(request, timeout=self._deadline_s))

    async def abort(self, run_id: RunId, epoch: Epoch, reason: str) -> None:
        """End an epoch."""
        request = pb.AbortStepRequest(run_id=run_id, epoch=epoch, reason=reason)
        await self._call("abort", lambda stub: stub.AbortStep(request, timeout=self._deadline_s))

    async def close_run(self, run_id: RunId) -> int:
        """Free everything of a run. Returns: bytes freed."""
        request = pb.CloseRunRequest(run_id=run_id)
        reply = await self._call(
            "close", lambda stub: stub.CloseRun(request, timeout=self._deadline_s)
        )
        return reply.freed_bytes

    async def ledger(self) -> pb.Ledger:
        """Who holds how many bytes."""
        request = pb.GetLedgerRequest()
        return await self._call(
            "ledger", lambda stub: stub.GetLedger(request, timeout=self._deadline_s)
        )

    async def watch(self, opened: Opened) -> AsyncIterator[Event]:
        """The node's events after `opened`, without end.

        Raises:
            PeerFailed: the stream broke, or the hub is another incarnation.
        """
        request = pb.WatchEventsRequest(
            hub_incarnation=opened.hub_incarnation, after_seq=opened.head_seq
        )
        try:
            stub = await self._fleet.broker()
            async for watched in stub.WatchEvents(request):
                yield event_from_proto(watched.event)
        except RollplexError as error:
            raise PeerFailed("event stream of broker/0", error) from error

    async def _call(self, what: str, call: Callable[[BrokerAsyncStub], Awaitable[Reply]]) -> Reply:
        try:
            return await call(await self._fleet.broker())
        except RollplexError as error:
            raise PeerFailed(f"{what} of broker/0", error) from error
