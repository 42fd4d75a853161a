"""What a test sees of a run: the newest epoch's events, over all lives of the broker."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from common.errors import RollplexError
from common.events import Event, bodies, event_from_proto
from protos.rollplex.v1.broker_pb2 import WatchEventsRequest

if TYPE_CHECKING:
    from tests.integration.runs.node import Node

Body = TypeVar("Body", bound=bodies.Body)

RECONNECT_S = 0.05


class Sightings:
    """Begins with the newest StepBegan at the time of `follow`."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._hub = ""
        self._seq = 0
        self._events: list[Event] = []
        self._joined: Counter[str] = Counter()
        self.began: Event | None = None
        """The newest StepBegan."""

    async def follow(self) -> None:
        while True:
            try:
                async with self._node.broker() as stub:
                    request = WatchEventsRequest(hub_incarnation=self._hub, after_seq=self._seq)
                    async for seen in stub.WatchEvents(request, timeout=3600):
                        self._hub, self._seq = seen.hub_incarnation, seen.event.seq
                        self._see(event_from_proto(seen.event))
            except RollplexError:
                # Another life of the broker has another order, which begins anew.
                self._hub, self._seq = "", 0
            await asyncio.sleep(RECONNECT_S)

    def _see(self, event: Event) -> None:
        if isinstance(event.body, bodies.ParticipantJoined):
            self._joined[str(event.body.participant)] += 1
        if isinstance(event.body, bodies.StepBegan):
            self.began = event
            self._events.clear()
        if self.began is not None and event.epoch == self.began.epoch:
            self._events.append(event)

    @property
    def step(self) -> int:
        """The step of the newest epoch; -1: none was seen."""
        return -1 if self.began is None else self.began.step

    @property
    def hinted(self) -> bool:
        """Whether the newest epoch's plan names prompts of the next step."""
        body = None if self.began is None else self.began.body
        return isinstance(body, bodies.StepBegan) and bool(body.plan.ahead)

    def of_epoch(self, kind: type[Body]) -> list[Event]:
        """Events of a kind in the newest epoch."""
        return [event for event in self._events if isinstance(event.body, kind)]

    def joined(self, participant: str) -> int:
        """How often a participant has opened its link to the broker."""
        return self._joined[participant]

    @property
    def window_is_open(self) -> bool:
        return bool(self.of_epoch(bodies.WindowOpened)) and not self.of_epoch(bodies.WindowClosed)

    @property
    def push_is_over(self) -> bool:
        return bool(self.of_epoch(bodies.PushEnded)) and not self.push_is_open

    @property
    def push_is_open(self) -> bool:
        return len(self.of_epoch(bodies.PushBegan)) > len(self.of_epoch(bodies.PushEnded))

    @property
    def groups_done(self) -> int:
        return len(self.of_epoch(bodies.PrefixBackpropagated))

    @property
    def published(self) -> bool:
        return bool(self.of_epoch(bodies.WeightsPublished))

    @property
    def running(self) -> bool:
        """Whether the newest epoch has begun and not ended."""
        ended = self.published or bool(self.of_epoch(bodies.StepAborted))
        return self.began is not None and not ended
