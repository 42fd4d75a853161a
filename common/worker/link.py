"""A worker's two connections to its node's broker process: data plane and event bus."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from common.bus.client import BusClient, HubRestarted
from common.errors import Unavailable
from common.tensors.client import BrokerClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from common.config.deployment import Deployment
    from common.events import Event
    from common.ids import Incarnation, Participant

_numbers = itertools.count(1)


class LinkDown(Unavailable):
    """One of the two connections has ended."""


class Link:
    """Both connections, alive or lost together: storages die with the broker.

    Attributes:
        number: no two links of a process have the same.
    """

    def __init__(self, broker: BrokerClient, bus: BusClient) -> None:
        self.number = next(_numbers)
        self.broker = broker
        self.bus = bus
        self._lost = ""

    @property
    def lost(self) -> str:
        """Why it is of no use any more; empty: it is."""
        return self._lost or self.broker.closed_reason

    def lose(self, reason: str) -> None:
        """One half was lost, and so the other is of no use either."""
        self._lost = self._lost or reason

    @classmethod
    async def open(
        cls,
        deployment: Deployment,
        participant: Participant,
        incarnation: Incarnation,
        *,
        device: str = "",
    ) -> Link:
        """Connect. Raises Unavailable if the broker is away.

        Args:
            device: UUID of the GPU that this process computes on; empty: the CPU.
        """
        broker = await BrokerClient.connect(
            deployment.broker_socket, participant, incarnation, device=device
        )
        bus = BusClient(deployment.hub_address, participant, incarnation)
        try:
            await bus.start()
        except BaseException:
            await bus.close(linger_s=0.0)
            await broker.close()
            raise
        return cls(broker, bus)

    async def events(self) -> AsyncIterator[Event]:
        """The node's order. Raises LinkDown when the hub is another one, BusErrors as they are."""
        async for item in self.bus.events():
            if isinstance(item, HubRestarted):
                raise LinkDown(
                    f"the hub {item.old_incarnation} was replaced by {item.new_incarnation}"
                )
            yield item

    async def broken(self) -> str:
        """Waits until the data plane's connection has ended; returns why."""
        await self.broker.closed.wait()
        return self.broker.closed_reason

    async def close(self) -> None:
        """Close both; what was published to a hub that is gone is dropped. Idempotent."""
        await (self.bus.close(linger_s=0.0) if self.lost else self.bus.close())
        await self.broker.close()
