"""One connection to the broker's data plane: requests, their answers, and one-way messages.

`ask` is for the event loop's thread. `tell` may be called from any thread, also by the garbage
collector: it only appends to a queue that the loop's thread empties, in order.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.tensors.errors import BrokerGone, BrokerTimeout, ProtocolViolation
from common.tensors.wire import (
    Packet,
    check_size,
    error_from_proto,
    new_socket,
    receive_packet,
    send_packet,
)
from protos.rollplex.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

_EOF = "the broker closed the connection, or died"
_RETRY_S = 0.05
_GRACE_S = 5.0
"""How much longer than its deadline a request waits for the broker to refuse it."""
_CLOSE_S = 1.0
"""How long `close` waits for the last one-way messages to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A reply with its descriptors, which belong to whoever takes the answer."""

    reply: pb.BrokerReply
    fds: tuple[int, ...]


class Connection:
    """See the module's text. All leases of a process hang on its one connection."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._sock = sock
        self._loop = loop
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._orphans: dict[int, Callable[[pb.BrokerReply], None]] = {}
        self._outbox: deque[bytes] = deque()
        self._flushing = False
        self._wants_write = False
        self.closed = asyncio.Event()
        self.closed_reason = ""
        loop.add_reader(sock.fileno(), self._readable)

    @classmethod
    async def open(cls, path: Path, *, timeout_s: float) -> Connection:
        """Connect; a broker that is not there yet is waited for.

        Raises:
            BrokerGone: there was no broker within `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + timeout_s
        while True:
            sock = new_socket()
            try:
                sock.connect(str(path))
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
                sock.close()
                if loop.time() >= give_up:
                    raise BrokerGone(
                        f"no broker at {path} within {timeout_s:g} s: {error}"
                    ) from error
                await asyncio.sleep(_RETRY_S)
            except BaseException:
                sock.close()
                raise
            else:
                return cls(sock, loop)

    async def ask(
        self,
        request: pb.BrokerRequest,
        *,
        timeout_s: float,
        undo: Callable[[pb.BrokerReply], None] | None = None,
    ) -> Answer:
        """Send a request and wait for its answer.

        Args:
            timeout_s: the deadline that the request carries; the broker keeps it.
            undo: gives back what a reply granted that comes after the caller was cancelled.

        Raises:
            RollplexError: what the broker refused it with.
            BrokerGone: the connection ended first.
            BrokerTimeout: the broker did not even refuse in time.
        """
        request.request_id = next(self._ids)
        data = check_size(request.SerializeToString(), f"the {request.WhichOneof('body')} request")
        if self.closed.is_set():
            raise BrokerGone(self.closed_reason)
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[request.request_id] = future
        self._send(data)
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                return await future
        except asyncio.CancelledError:
            self._take_back(request.request_id, future, undo)
            raise
        except TimeoutError as error:
            self._take_back(request.request_id, future, undo)
            raise BrokerTimeout(
                f"the broker did not answer {request.WhichOneof('body')} within "
                f"{timeout_s + _GRACE_S:g} s"
            ) from error

    def tell(self, request: pb.BrokerRequest) -> None:
        """Send a one-way message; any thread. Does nothing once the connection has ended."""
        if self.closed.is_set():
            return
        self._outbox.append(request.SerializeToString())
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            self._flush()
        elif not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._flush)
            except RuntimeError:
                self._outbox.clear()  # the loop closed just now, and the connection with it

    async def close(self) -> None:
        """Send what is queued, then end the connection. Idempotent."""
        give_up = self._loop.time() + _CLOSE_S
        while self._outbox and not self.closed.is_set() and self._loop.time() < give_up:
            self._flush()
            await asyncio.sleep(0)
        self._lose("closed by this process")

    def _send(self, data: bytes) -> None:
        self._outbox.append(data)
        self._flush()

    def _flush(self) -> None:
        if self._flushing:
            return  # the garbage collector called `tell` from below; the outer call goes on
        self._flushing = True
        try:
            while self._outbox and not self.closed.is_set():
                try:
                    send_packet(self._sock, self._outbox[0])
                except BlockingIOError:
                    self._watch_writable(wanted=True)
                    return
                except (BrokenPipeError, ConnectionResetError):
                    self._lose(_EOF)
                    return
                except OSError as error:
                    self._lose(f"the connection to the broker broke: {error}")
                    return
                self._outbox.popleft()
            self._watch_writable(wanted=False)
        finally:
            self._flushing = False

    def _watch_writable(self, *, wanted: bool) -> None:
        if self.closed.is_set() or wanted == self._wants_write:
            return
        self._wants_write = wanted
        if wanted:
            self._loop.add_writer(self._sock.fileno(), self._flush)
        else:
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        while not self.closed.is_set():
            try:
                packet = receive_packet(self._sock)
            except BlockingIOError:
                return
            except ConnectionResetError:
                self._lose(_EOF)
                return
            except (OSError, ProtocolViolation) as error:
                self._lose(f"the connection to the broker broke: {error}")
                return
            if not packet.data:
                self._lose(_EOF)
                return
            self._deliver(packet)

    def _deliver(self, packet: Packet) -> None:
        reply = pb.BrokerReply.FromString(packet.data)
        future = self._waiting.pop(reply.request_id, None)
        if future is None or future.done():
            undo = self._orphans.pop(reply.request_id, None)
            packet.close()
            if undo is not None and reply.WhichOneof("body") != "error":
                undo(reply)
        elif reply.WhichOneof("body") == "error":
            packet.close()
            future.set_exception(error_from_proto(reply.error))
        else:
            future.set_result(Answer(reply=reply, fds=packet.fds))

    def _take_back(
        self,
        request_id: int,
        future: asyncio.Future[Answer],
        undo: Callable[[pb.BrokerReply], None] | None,
    ) -> None:
        """The caller no longer waits: cancel the request, or undo what was granted already."""
        self._waiting.pop(request_id, None)
        if future.done() and not future.cancelled():
            if future.exception() is None:
                answer = future.result()
                Packet(data=b"", fds=answer.fds).close()
                if undo is not None:
                    undo(answer.reply)
            return
        if undo is not None:
            self._orphans[request_id] = undo
        self.tell(pb.BrokerRequest(cancel=pb.Cancel(request_id=request_id)))

    def _lose(self, reason: str) -> None:
        if self.closed.is_set():
            return
        self._watch_writable(wanted=False)
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        self.closed_reason = reason
        self.closed.set()
        self._outbox.clear()
        self._orphans.clear()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(BrokerGone(reason))
