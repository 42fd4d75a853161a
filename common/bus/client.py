"""A process's side of the event bus.

What it promises: events come in the hub's order without a hole; what was published is in that
order, once and in the order of publication, or was refused by the hub's fence. To keep this across
broken connections and restarted hubs, one event is on its way at a time: the next one is sent when
this one was seen in the order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio
from google.protobuf.message import DecodeError

from common.bus.errors import BusRefused, SequenceGap
from common.bus.sockets import send_now
from common.errors import FailedPrecondition, RollplexError, Unavailable
from common.events import event_from_proto, event_to_proto
from common.ids import Incarnation, Participant
from protos.rollplex.v1 import events_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from common.events import Event

log = logging.getLogger(__name__)

QUEUE_EVENTS = 65_536
"""Events that wait for the reader. Past that the socket is left alone, so the hub's queue fills,
and what it cuts off there comes by replay."""
PENDING_EVENTS = 4_096
"""Published events not seen in the order yet; past that `publish` waits."""
HEARTBEAT_S = 0.5
_RESEND_AFTER_HEARTBEATS = 2
_SEND_QUEUE_MESSAGES = 64
"""Hellos and pings that may wait while the hub is away; more are not queued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRestarted:
    """The hub is another one: its order begins anew, and events of the old one are gone.

    Leases went with it, since hub and broker are one process.
    """

    old_incarnation: Incarnation
    new_incarnation: Incarnation


class BusClient:
    """Publishes and reads the node's events; for one event loop and one reader."""

    def __init__(
        self,
        address: str,
        participant: Participant,
        incarnation: Incarnation,
        *,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """Args:
        address: the hub's `ipc://path`; it need not exist yet.
        participant: who publishes.
        incarnation: this life of the process.
        heartbeat_s: between two pings; a lost tail is noticed within two of them.
        """
        self.address = address
        self.participant = participant
        self.incarnation = incarnation
        self._heartbeat_s = heartbeat_s
        self._hub = Incarnation("")
        self._last_seq = 0
        self._pending: dict[str, bytes] = {}
        self._sent_s = float("-inf")
        self._room = asyncio.Event()
        self._queue: asyncio.Queue[Event | HubRestarted | None] = asyncio.Queue(QUEUE_EVENTS)
        self._welcomed = asyncio.Event()
        self._awaiting_welcome = True
        self._last_reply_s = float("-inf")
        self._failure: RollplexError | None = None
        self._closed = False
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def hub_incarnation(self) -> Incarnation:
        """The hub whose order is read now; empty: none yet."""
        return self._hub

    @property
    def last_seq(self) -> int:
        """Number of the newest event received of that hub."""
        return self._last_seq

    @property
    def connected(self) -> bool:
        """Whether the hub answered within the last four heartbeats."""
        return time.monotonic() - self._last_reply_s < 4 * self._heartbeat_s

    async def start(self, *, timeout_s: float = 30.0) -> None:
        """Connect and wait to be a subscriber; events from the newest StepBegan on will come.

        Raises:
            Unavailable: no hub answered within `timeout_s`; the client is closed.
        """
        assert self._socket is None, "start is called once"
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, f"{self.participant}#{self.incarnation}".encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, QUEUE_EVENTS)
        socket.connect(self.address)
        self._socket = socket
        self._say_hello()
        self._tasks = [
            asyncio.create_task(self._receive(socket), name="bus-receiver"),
            asyncio.create_task(self._heartbeat(), name="bus-heartbeat"),
        ]
        try:
            async with asyncio.timeout(timeout_s):
                await self._welcomed.wait()
        except TimeoutError:
            await self.close(linger_s=0)
            raise Unavailable(
                f"no event hub answered at {self.address} within {timeout_s} s; is the broker up?"
            ) from None

    async def publish(self, event: Event) -> None:
        """Queue an event for the order; it is sent, and sent again, until it is there.

        Raises:
            FailedPrecondition: the client is closed.
            RollplexError: what ended the client, as `events` raises it.
        """
        while len(self._pending) >= PENDING_EVENTS and not self._ended:
            self._room.clear()
            await self._room.wait()
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise FailedPrecondition(f"the bus client of {self.participant} is closed")
        request = events_pb2.HubRequest(publish=event_to_proto(event))
        self._pending[event.event_id] = request.SerializeToString()
        if len(self._pending) == 1:
            self._send_oldest()

    async def events(self) -> AsyncIterator[Event | HubRestarted]:
        """Everything in the order, own events included; ends with `close`.

        Raises:
            SequenceGap: events are lost for good.
            BusRefused: the hub could not read one of this client's events.
        """
        while True:
            item = await self._queue.get()
            if item is None:
                # For a reader that comes later.
                self._queue.put_nowait(None)
                if self._failure is not None:
                    raise self._failure
                return
            yield item

    async def close(self, *, linger_s: float = 1.0) -> None:
        """Wait until everything published is in the order, at most `linger_s`; disconnect.

        Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(linger_s):
                while self._pending and self._failure is None:
                    self._room.clear()
                    await self._room.wait()
        if self._pending:
            log.warning("published events are lost", extra={"count": len(self._pending)})
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)
        self._end()

    @property
    def _ended(self) -> bool:
        return self._closed or self._failure is not None

    async def _heartbeat(self) -> None:
        while self._failure is None:
            await asyncio.sleep(self._heartbeat_s)
            if self._awaiting_welcome:
                self._say_hello()
                continue
            if time.monotonic() - self._sent_s > _RESEND_AFTER_HEARTBEATS * self._heartbeat_s:
                self._send_oldest()
            ping = events_pb2.HubPing(hub_incarnation=self._hub, last_seq=self._last_seq)
            self._send(events_pb2.HubRequest(ping=ping).SerializeToString())

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        try:
            while self._failure is None:
                frames = await socket.recv_multipart()
                reply = events_pb2.HubReply.FromString(frames[-1])
                self._last_reply_s = time.monotonic()
                kind = reply.WhichOneof("body")
                if kind == "deliver":
                    await self._delivered(reply.deliver)
                elif kind == "welcome":
                    await self._welcome(reply.welcome)
                elif kind == "pong":
                    self._pong(reply.pong)
                else:
                    raise BusRefused(f"{reply.error.type}: {reply.error.message}")
        except RollplexError as error:
            self._fail(error)
        except (DecodeError, ValueError, KeyError) as error:
            self._fail(BusRefused(f"a message of the hub cannot be read: {error!r}"))

    async def _welcome(self, welcome: events_pb2.HubWelcome) -> None:
        new = Incarnation(welcome.hub_incarnation)
        if self._hub == new and self._last_seq + 1 < welcome.first_seq:
            raise SequenceGap(
                f"{self.participant} saw events up to {self._last_seq} of hub {new}, and the "
                f"oldest that it can still get is {welcome.first_seq}",
                last_seq=self._last_seq,
                first_seq=welcome.first_seq,
            )
        if self._hub != new:
            if self._hub:
                await self._queue.put(HubRestarted(old_incarnation=self._hub, new_incarnation=new))
            self._hub, self._last_seq = new, welcome.first_seq - 1
        self._awaiting_welcome = False
        self._welcomed.set()
        self._send_oldest()

    async def _delivered(self, message: events_pb2.Event) -> None:
        in_order = message.seq == self._last_seq + 1
        if in_order:
            self._last_seq = message.seq
            await self._queue.put(event_from_proto(message))
        elif message.seq > self._last_seq:
            if not self._awaiting_welcome:
                log.warning(
                    "events were lost on the way, asking again",
                    extra={"last_seq": self._last_seq, "got_seq": message.seq},
                )
                self._say_hello()
            return
        # Seen, seen before, or (seq 0) refused: in each case it need not be sent again.
        if self._pending.pop(message.event_id, None) is not None:
            self._room.set()
            self._send_oldest()

    def _pong(self, pong: events_pb2.HubPong) -> None:
        # Deliveries and pongs share one queue: what the hub had sent before is here already.
        lost_tail = pong.head_seq > self._last_seq
        if not self._awaiting_welcome and (
            not pong.known or pong.hub_incarnation != self._hub or lost_tail
        ):
            self._say_hello()

    def _say_hello(self) -> None:
        self._awaiting_welcome = True
        hello = events_pb2.HubHello(
            participant=str(self.participant),
            incarnation=self.incarnation,
            hub_incarnation=self._hub,
            after_seq=self._last_seq,
        )
        self._send(events_pb2.HubRequest(hello=hello).SerializeToString())

    def _send_oldest(self) -> None:
        if self._pending and not self._awaiting_welcome:
            self._sent_s = time.monotonic()
            self._send(next(iter(self._pending.values())))

    def _send(self, wire: bytes) -> None:
        if self._socket is None:
            return
        # No room: the hub is away. Hello, ping and the oldest event are all sent again later.
        with contextlib.suppress(zmq.Again):
            send_now(self._socket, wire)

    def _fail(self, error: RollplexError) -> None:
        log.error("the event bus is lost", extra={"cause": str(error)})
        self._failure = error
        self._end()

    def _end(self) -> None:
        self._room.set()
        if self._queue.full():
            # Nobody reads a full queue's tail after the end; the end itself has to get through.
            self._queue.get_nowait()
        self._queue.put_nowait(None)
