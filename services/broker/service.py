"""The broker's process, put together: data plane, hub, control plane, metrics."""

from __future__ import annotations

import asyncio
import resource
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge

from common.bus.hub import Hub
from common.gpu.health import watch
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


class SpillMeter:
    """Counts what was spilled and restored; see `memory.CopyMeter`."""

    def __init__(self, metrics: CollectorRegistry) -> None:
        counter = partial(Counter, registry=metrics)
        self._spilled = counter("rollplex_spilled_bytes", "Copied from devices to the host.")
        self._spilled_s = counter("rollplex_spilled_seconds", "What that took.")
        self._restored = counter("rollplex_restored_bytes", "Copied from the host to devices.")
        self._restored_s = counter("rollplex_restored_seconds", "What that took.")

    def spilled(self, size_bytes: int, seconds: float) -> None:
        """Contents have gone to the host's memory."""
        self._spilled.inc(size_bytes)
        self._spilled_s.inc(seconds)

    def restored(self, size_bytes: int, seconds: float) -> None:
        """Contents have come back."""
        self._restored.inc(size_bytes)
        self._restored_s.inc(seconds)


class BrokerService:
    """Built by `create`; see `common.service.context.Service` for the order of calls."""

    def __init__(
        self, actor: BrokerActor, hub: Hub, metrics: CollectorRegistry, *, gpus: int
    ) -> None:
        self._actor = actor
        self._hub = hub
        self._gpus = gpus
        by_device = partial(Gauge, labelnames=("device",), registry=metrics)
        self._used = by_device("rollplex_arena_used_bytes", "Bytes handed out.")
        self._held = by_device("rollplex_arena_held_bytes", "Allocators and contexts.")
        self._peak = by_device("rollplex_arena_peak_bytes", "Most bytes ever out.")
        self._entries = Gauge("rollplex_ledger_entries", "Leases and others.", registry=metrics)
        self._connected = Gauge("rollplex_participants", "Connected.", registry=metrics)
        self._capacity = by_device("rollplex_arena_capacity_bytes", "Budget.")
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
            copies_bytes=deployment.spill_bytes,
            meter=SpillMeter(context.metrics),
        )
        await actor.start()
        try:
            await hub.start()
        except BaseException:
            actor.close()
            raise
        return cls(actor, hub, context.metrics, gpus=deployment.gpus)

    async def run(self) -> None:
        """Keep the metrics fresh; raises what broke the state, or DeviceLost."""
        watches = [asyncio.create_task(watch(ordinal)) for ordinal in range(self._gpus)]
        try:
            await self._keep_metrics(watches)
        finally:
            for task in watches:
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _keep_metrics(self, watches: list[asyncio.Task[None]]) -> None:
        while not self._actor.failed.is_set():
            for task in watches:
                if task.done():
                    task.result()
            ledger = self._actor.ledger()
            for arena in ledger.arenas:
                self._capacity.labels(arena.device).set(arena.capacity_bytes)
                self._used.labels(arena.device).set(arena.used_bytes)
                self._held.labels(arena.device).set(arena.held_bytes)
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
    host_bytes = deployment.arena_bytes
    arenas = [BudgetedArena(arena=MemfdArena(), capacity_bytes=host_bytes, limit_bytes=host_bytes)]
    if deployment.gpus:
        from services.broker.arena_cuda import gpu_arena

        arenas += [gpu_arena(deployment, ordinal) for ordinal in range(deployment.gpus)]
    return arenas


def _raise_descriptor_limit() -> None:
    """Every allocation is a descriptor: take as many as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
