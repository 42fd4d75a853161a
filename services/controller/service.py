"""The controller as a service process: builds its parts, runs and closes them in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.ids import Service as ServiceKind
from common.registry.client import Registry
from common.registry.runs import RunLedger
from common.transport import BoundServicer
from protos.rollplex.v1 import control_pb2_grpc
from services.controller.actor import ControllerActor
from services.controller.admission import Admission
from services.controller.broker import BrokerPort
from services.controller.config import load_controller_config
from services.controller.fleet import Fleet
from services.controller.servicer import SERVICE_NAME, ControlServicer
from services.controller.store import Store

if TYPE_CHECKING:
    from common.service.context import ServiceContext

_REGISTRY_DEADLINE_S = 1.0


class ControllerService:
    """Runs until it is drained; a run goes on where it was after the next start."""

    def __init__(self, context: ServiceContext) -> None:
        deployment = context.deployment
        config = load_controller_config(deployment)
        expected = [p for p in deployment.participants if p.service is not ServiceKind.CONTROLLER]
        # Waits for Redis are bounded here, because the run machine has to hear of them.
        self._registry = Registry.of(deployment, deadline_s=_REGISTRY_DEADLINE_S)
        self._store = Store(RunLedger.of(deployment))
        self._fleet = Fleet(self._registry, expected, config)
        broker = BrokerPort(self._fleet, call_deadline_s=deployment.deadlines.call_s)
        self._actor = ControllerActor(
            deployment=deployment,
            store=self._store,
            fleet=self._fleet,
            broker=broker,
            config=config,
        )
        servicer = ControlServicer(
            self._actor, Admission(deployment, config, broker), self._store, self._fleet
        )
        self._servicers = (
            BoundServicer(
                name=SERVICE_NAME,
                servicer=servicer,
                add=control_pb2_grpc.add_ControlServicer_to_server,
            ),
        )

    @classmethod
    async def build(cls, context: ServiceContext) -> ControllerService:
        """Read the ledger, so that clients see every run from the first answer on."""
        service = cls(context)
        try:
            await service._actor.load()
        except BaseException:
            await service.close()
            raise
        return service

    @property
    def servicers(self) -> tuple[BoundServicer, ...]:
        """What the process serves by gRPC."""
        return self._servicers

    async def run(self) -> None:
        """Handle messages until `drain`."""
        await self._actor.run()

    async def drain(self) -> None:
        """Stop in the middle of whatever runs: the ledger knows where to go on."""
        await self._actor.stop()

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        await self._fleet.close()
        await self._store.close()
        await self._registry.close()
