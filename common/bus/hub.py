"""The hub: one order for the events of a node.

Protocol: `protos/rollplex/v1/events.proto`; page: `docs/protocols/bus.md`.

Why nothing is lost:
- *READY barrier.* A client is a subscriber from its `HubHello` on, and the hub answers with a
  `HubWelcome` that names the first number it will get. Nothing is published by it, or delivered to
  it, before. A slow joiner therefore misses nothing: it begins at the newest `StepBegan`.
- *High-water mark.* Each peer's queue takes `PEER_QUEUE_EVENTS` messages, more than the log keeps,
  so that a full replay fits. A peer whose queue is full, or that cannot be routed to, stops being a
  subscriber at once: it gets no later event, so there is no hole in the middle. Its next ping is
  answered with `known=false`, it says hello again with the last number it saw, and gets the rest.
- *Fence.* An event that `admit` refuses (an older epoch) gets no number. Its publisher gets it back
  with `seq` 0, forgets it, and so does not send it for ever.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio
from google.protobuf.message import DecodeError

from common.bus.errors import SequenceGap
from common.bus.event_log import KEPT_LIMIT, EventLog
from common.bus.sockets import bind_private, remove_socket_file, send_now
from common.errors import ErrorCode, FailedPrecondition
from common.events import UnknownEvent, event_from_proto
from common.ids import Incarnation
from protos.rollplex.v1 import common_pb2, events_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from common.bus.event_log import LoggedEvent
    from common.events import Event

log = logging.getLogger(__name__)

PEER_QUEUE_EVENTS = KEPT_LIMIT + 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peer:
    """A subscriber. Kept in `Hub._peers` under its routing id while it gets every event."""

    participant: str
    incarnation: str


class Hub:
    """Sequences events and delivers them; lives in the broker's process, on its event loop."""

    def __init__(
        self,
        address: str,
        *,
        admit: Callable[[Event], bool] = lambda _: True,
        kept_limit: int = KEPT_LIMIT,
    ) -> None:
        """Args:
        address: `ipc://path`; the socket is for this user only.
        admit: whether an event from a client may have a place in the order.
        kept_limit: most events kept for replay.
        """
        self.address = address
        self.incarnation = Incarnation(uuid.uuid4().hex)
        self._admit = admit
        self._log = EventLog(kept_limit=kept_limit)
        self._peers: dict[bytes, _Peer] = {}
        self._appended = asyncio.Event()
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._receiver: asyncio.Task[None] | None = None

    @property
    def head_seq(self) -> int:
        """Number of the newest event; 0: none yet."""
        return self._log.head_seq

    @property
    def subscribers(self) -> frozenset[str]:
        """Participants that get every event now."""
        return frozenset(peer.participant for peer in self._peers.values())

    async def start(self) -> None:
        """Bind and begin to answer.

        Raises:
            FailedPrecondition: the address cannot be bound.
        """
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A client that reconnects keeps its routing id; the newer connection has it.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.SNDHWM, PEER_QUEUE_EVENTS)
        socket.setsockopt(zmq.RCVHWM, PEER_QUEUE_EVENTS)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            bind_private(socket, self.address)
        except FailedPrecondition:
            self._context.destroy(linger=0)
            raise
        self._socket = socket
        self._receiver = asyncio.create_task(self._receive(socket), name="hub-receiver")

    async def close(self) -> None:
        """Stop answering and end the subscriptions. Idempotent."""
        socket, self._socket = self._socket, None
        if socket is None or self._receiver is None or self._context is None:
            return
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        self._context.destroy(linger=0)
        remove_socket_file(self.address)
        self._wake_subscriptions()

    def publish(self, event: Event) -> int:
        """Give an event of this process a place in the order and send it to all.

        The fence is not asked. A repeated event_id has no effect.

        Returns: the event's number.
        """
        logged = self._log.find(event.event_id)
        if logged is None:
            logged = self._log.append(event)
            self._deliver(logged)
        return logged.event.seq

    async def subscribe(self, after_seq: int | None = None) -> AsyncIterator[Event]:
        """Every event after that number, then live, until the hub closes.

        Args:
            after_seq: last number seen; None: begin with the newest StepBegan.

        Raises:
            SequenceGap: the next event is not kept any more.
        """
        seq = self._log.step_seq - 1 if after_seq is None else after_seq
        while True:
            appended = self._appended
            for logged in self._log.after(seq):
                seq = logged.event.seq
                yield logged.event
            if seq == self._log.head_seq:
                if self._socket is None:
                    return
                await appended.wait()

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            routing_id, *frames = await socket.recv_multipart()
            try:
                self._answer(routing_id, events_pb2.HubRequest.FromString(frames[-1]))
            except (DecodeError, IndexError):
                log.exception("unreadable hub request", extra={"peer": routing_id})
                self._refuse(routing_id, "DecodeError", "the request is not a HubRequest")

    def _answer(self, routing_id: bytes, request: events_pb2.HubRequest) -> None:
        kind = request.WhichOneof("body")
        if kind == "hello":
            self._welcome(routing_id, request.hello)
        elif kind == "publish":
            self._accept(routing_id, request.publish)
        elif kind == "ping":
            self._pong(routing_id)
        else:
            self._refuse(routing_id, "UnknownRequest", "the request has no kind known here")

    def _welcome(self, routing_id: bytes, hello: events_pb2.HubHello) -> None:
        for other, peer in list(self._peers.items()):
            if peer.participant == hello.participant and other != routing_id:
                del self._peers[other]
        same_hub = hello.hub_incarnation == self.incarnation
        seq = hello.after_seq if same_hub else self._log.step_seq - 1
        replay: list[LoggedEvent] = []
        try:
            replay = self._log.after(seq)
            first_seq = seq + 1
        except SequenceGap as gap:
            # The client compares, and raises: it alone knows what it lost.
            log.warning("subscriber has a gap", extra={"peer": hello.participant, "gap": str(gap)})
            first_seq = self._log.head_seq + 1
        self._peers[routing_id] = _Peer(
            participant=hello.participant, incarnation=hello.incarnation
        )
        welcome = events_pb2.HubWelcome(
            hub_incarnation=self.incarnation, first_seq=first_seq, replayed=bool(replay)
        )
        log.info(
            "subscriber joined",
            extra={"peer": hello.participant, "first_seq": first_seq, "replayed": len(replay)},
        )
        if self._send(routing_id, events_pb2.HubReply(welcome=welcome).SerializeToString()):
            for logged in replay:
                if not self._send(routing_id, logged.delivery):
                    return

    def _accept(self, routing_id: bytes, message: events_pb2.Event) -> None:
        if routing_id not in self._peers:
            # It may not know yet that this is another hub; it sends the event again after hello.
            self._pong(routing_id)
            return
        logged = self._log.find(message.event_id)
        if logged is not None:
            self._send(routing_id, logged.delivery)
            return
        try:
            event = event_from_proto(message)
        except (UnknownEvent, ValueError, KeyError) as error:
            log.exception("unreadable event", extra={"peer": self._peers[routing_id].participant})
            self._refuse(routing_id, type(error).__name__, f"event {message.event_id}: {error}")
            return
        if self._admit(event):
            self._deliver(self._log.append(event))
            return
        log.info(
            "event of an ended epoch refused",
            extra={"peer": message.sender, "event": message.event_id, "epoch": message.epoch},
        )
        message.seq = 0
        self._send(routing_id, events_pb2.HubReply(deliver=message).SerializeToString())

    def _deliver(self, logged: LoggedEvent) -> None:
        for routing_id in list(self._peers):
            self._send(routing_id, logged.delivery)
        self._wake_subscriptions()

    def _wake_subscriptions(self) -> None:
        appended, self._appended = self._appended, asyncio.Event()
        appended.set()

    def _pong(self, routing_id: bytes) -> None:
        pong = events_pb2.HubPong(
            hub_incarnation=self.incarnation,
            head_seq=self._log.head_seq,
            known=routing_id in self._peers,
        )
        self._send(routing_id, events_pb2.HubReply(pong=pong).SerializeToString())

    def _refuse(self, routing_id: bytes, kind: str, message: str) -> None:
        error = common_pb2.ErrorDetail(
            code=ErrorCode.INVALID_ARGUMENT.value, type=kind, message=message
        )
        self._send(routing_id, events_pb2.HubReply(error=error).SerializeToString())

    def _send(self, routing_id: bytes, reply: bytes) -> bool:
        if self._socket is None:
            return False
        try:
            send_now(self._socket, routing_id, reply)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            peer = self._peers.pop(routing_id, None)
            if peer is not None:
                log.warning(
                    "subscriber cannot be reached and has to say hello again",
                    extra={"peer": peer.participant, "cause": str(error)},
                )
            return False
        return True
