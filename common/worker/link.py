"""A worker's two connections to its node's broker process: data plane and event bus."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

from common.bus.client import BusClient, HubRestarted
from common.config.deployment import Deployment
from common.errors import RollplexError
from common.events import Event
from common.ids import Incarnation, Participant
from common.tensors.client import BrokerClient

_numbers = itertools.count(1)


class LinkDown(RollplexError):
    """One of the two connections has ended."""


class Link:
    """Both connections, alive or lost together: storages die with the broker."""

    def __init__(self, broker: BrokerClient, bus: BusClient) -> None:
        self.number = next(_numbers)
        self.broker = broker
        self.bus = bus

    @classmethod
    async def open(
        cls, deployment: Deployment, participant: Participant, incarnation: Incarnation
    ) -> Link:
        """Connect. Raises Unavailable if the broker is away."""
        broker = await BrokerClient.connect(deployment.broker_socket, participant, incarnation)
        bus = BusClient(deployment.hub_address, participant, incarnation)
        try:
            await bus.start()
        except BaseException:
            await broker.close()
            raise
        return cls(broker, bus)

    async def events(self) -> AsyncIterator[Event]:
        """The node's order, until either connection ends. Raises LinkDown with the cause."""
        closed = asyncio.ensure_future(self.broker.closed.wait())
        stream = aiter(self.bus.events())
        try:
            while True:
                arrival = asyncio.ensure_future(anext(stream))
                await asyncio.wait({arrival, closed}, return_when=asyncio.FIRST_COMPLETED)
                if not arrival.done():
                    arrival.cancel()
                    raise LinkDown(f"broker: {self.broker.closed_reason}")
                item = arrival.result()
                if isinstance(item, HubRestarted):
                    raise LinkDown(f"the hub is another incarnation: {item}")
                yield item
        finally:
            closed.cancel()

    async def close(self) -> None:
        """Close both. Idempotent."""
        await self.bus.close()
        await self.broker.close()
