"""The broker's process, put together: data plane, hub, control plane, metrics."""

from __future__ import annotations

import asyncio
import resource
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import Gauge

from common.bus.hub import Hub
from common.transport import BoundServicer
from protos.rollplex.v1 import broker_pb2, broker_pb2_grpc
from services.broker.actor import BrokerActor
from services.broker.arena import BudgetedArena, MemfdArena
from services.broker.servicer import BrokerServicer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from common.config.deployment import Deployment
    from common.service.context import ServiceContext

_METRICS_S = 1.0


class BrokerService:
    """Built by `create`; see `common.service.context.Service` for the order of calls."""

    def __init__(self, actor: BrokerActor, hub: Hub, metrics: CollectorRegistry) -> None:
        self._actor = actor
        self._hub = hub
        by_device = partial(Gauge, labelnames=("device",), registry=metrics)
        self._used = by_device("rollplex_arena_used_bytes", "Bytes handed out.")
        self._peak = by_device("rollplex_arena_peak_bytes", "Most bytes ever out.")
        self._entries = Gauge("rollplex_ledger_entries", "Leases and others.", registry=metrics)
        self._connected = Gauge("rollplex_participants", "Connected.", registry=metrics)
        capacity = by_device("rollplex_arena_capacity_bytes", "Budget.")
        for arena in actor.ledger().arenas:
            capacity.labels(arena.device).set(arena.capacity_bytes)
        descriptor = broker_pb2.DESCRIPTOR.services_by_name["Broker"]
        self.servicers = (
            BoundServicer(
                name=descriptor.full_name,
                servicer=BrokerServicer(actor, hub),
                add=broker_pb2_grpc.add_BrokerServicer_to_server,
            ),
        )

    @classmethod
    async def create(cls, context: ServiceContext) -> BrokerService:
        """Open both sockets. Raises FailedPrecondition if one cannot be had."""
        _raise_descriptor_limit()
        deployment = context.deployment
        hub = Hub(deployment.hub_address, admit=lambda event: actor.admits(event))
        actor = BrokerActor(
            arenas=_arenas(deployment),
            socket_path=deployment.broker_socket,
            publish=hub.publish,
        )
        await actor.start()
        try:
            await hub.start()
        except BaseException:
            actor.close()
            raise
        return cls(actor, hub, context.metrics)

    async def run(self) -> None:
        """Keep the metrics fresh; raises what broke the state."""
        while not self._actor.failed.is_set():
            ledger = self._actor.ledger()
            for arena in ledger.arenas:
                self._used.labels(arena.device).set(arena.used_bytes)
                self._peak.labels(arena.device).set(arena.peak_bytes)
            self._entries.set(len(ledger.rows))
            self._connected.set(self._actor.participants)
            try:
                async with asyncio.timeout(_METRICS_S):
                    await self._actor.failed.wait()
            except TimeoutError:
                continue
        assert self._actor.failure is not None
        raise self._actor.failure

    async def drain(self) -> None:
        """Nothing of the broker's own is under way; the participants are told by the end."""

    async def close(self) -> None:
        """End the sessions, give the memory back, close the hub. Idempotent."""
        self._actor.close()
        await self._hub.close()


def _arenas(deployment: Deployment) -> list[BudgetedArena]:
    """The host's memory, and that of each GPU that is used."""
    arenas = [BudgetedArena(arena=MemfdArena(), capacity_bytes=deployment.arena_bytes)]
    if deployment.gpus:
        from services.broker.arena_cuda import gpu_arena

        arenas += [gpu_arena(deployment, ordinal) for ordinal in range(deployment.gpus)]
    return arenas


def _raise_descriptor_limit() -> None:
    """Every allocation is a descriptor: take as many as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
