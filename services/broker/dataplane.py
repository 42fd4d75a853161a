"""The data plane's socket: sessions, packets in, packets out.

A session is one connection, one process. Its end, for whatever reason, is the death of the
participant. Only processes of the broker's own user may connect, and the kernel says which process
it is, not the process itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import struct
from collections import deque
from typing import TYPE_CHECKING, Protocol

from google.protobuf.message import DecodeError

from common.errors import FailedPrecondition
from common.ids import Participant, Service
from common.tensors.errors import ProtocolViolation
from common.tensors.wire import (
    MESSAGE_LIMIT_BYTES,
    Packet,
    new_socket,
    receive_packet,
    send_packet,
)
from protos.rollplex.v1 import broker_pb2 as pb
from services.broker.events import SessionId

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

_BACKLOG = 128
_OUTBOX_PACKETS = 4096
"""Replies that a session may leave unread; a healthy one reads each at once."""
_RECEIVE_BURST = 64
"""Packets read from one session before the others have their turn."""
_CREDENTIALS = struct.Struct("3i")


class SessionHandler(Protocol):
    """Who is told what happens on the data plane. Called on the event loop, never nested."""

    def joined(
        self, session: SessionId, participant: Participant, pid: int, join: pb.Join
    ) -> pb.Joined:
        """A participant is there. It has no other session. Returns what it is answered."""

    def received(
        self, session: SessionId, participant: Participant, request: pb.BrokerRequest
    ) -> None:
        """It asks something."""

    def lost(self, session: SessionId, reason: str) -> None:
        """A session that had joined has ended."""


class _Session:
    """One connection. `participant` is None until it joins."""

    def __init__(self, session_id: SessionId, sock: socket.socket, pid: int) -> None:
        self.id = session_id
        self.sock = sock
        self.pid = pid
        self.participant: Participant | None = None
        self.outbox: deque[Packet] = deque()

    def __str__(self) -> str:
        return f"{self.participant or 'a process that has not joined'} (pid {self.pid})"


class DataPlane:
    """See the module's text."""

    def __init__(self, path: Path, handler: SessionHandler) -> None:
        self._path = path
        self._handler = handler
        self._listener: socket.socket | None = None
        self._sessions: dict[SessionId, _Session] = {}
        self._next_id = SessionId(1)

    async def start(self) -> None:
        """Bind and listen.

        Raises:
            FailedPrecondition: another broker serves this path, or something else is in its place.
        """
        self._clear_leftover()
        listener = new_socket()
        mask = os.umask(0o177)
        try:
            listener.bind(str(self._path))
        except OSError as error:
            listener.close()
            raise FailedPrecondition(
                f"the broker cannot bind its socket {self._path}: {error}; choose another state_dir"
            ) from error
        finally:
            os.umask(mask)
        listener.listen(_BACKLOG)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """End all sessions and remove the socket. Idempotent; nobody is told of the losses."""
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        self._listener = None
        self._path.unlink(missing_ok=True)
        for session in list(self._sessions.values()):
            session.participant = None
            self._end(session, "the broker stops")

    def send(self, session_id: SessionId, reply: pb.BrokerReply, fds: tuple[int, ...]) -> None:
        """Send a reply; the descriptors are closed once it is out. Nothing for an ended session."""
        packet = Packet(data=reply.SerializeToString(), fds=fds)
        session = self._sessions.get(session_id)
        if session is None:
            packet.close()
            return
        if len(packet.data) > MESSAGE_LIMIT_BYTES or len(session.outbox) >= _OUTBOX_PACKETS:
            packet.close()
            self._end(
                session,
                f"a reply of {len(packet.data)} bytes does not fit: a packet holds "
                f"{MESSAGE_LIMIT_BYTES}, and {len(session.outbox)} replies lie unread",
            )
            return
        session.outbox.append(packet)
        if len(session.outbox) == 1:
            self._flush(session)

    def disconnect(self, session_id: SessionId, reason: str) -> None:
        """End a session; the handler is told."""
        session = self._sessions.get(session_id)
        if session is not None:
            self._end(session, reason)

    def _clear_leftover(self) -> None:
        """Remove the socket of a broker that died; one that lives is left alone."""
        try:
            mode = self._path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise FailedPrecondition(f"{self._path} exists and is no socket; remove it")
        with new_socket() as probe:
            try:
                probe.connect(str(self._path))
            except ConnectionRefusedError:
                self._path.unlink(missing_ok=True)
            except BlockingIOError:
                raise FailedPrecondition(f"another broker serves {self._path}; stop it") from None
            else:
                raise FailedPrecondition(f"another broker serves {self._path}; stop it")

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        sock.setblocking(False)
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != os.getuid():
            log.warning("connection of another user refused", extra={"uid": uid, "pid": pid})
            sock.close()
            return
        session = _Session(self._next_id, sock, pid)
        self._next_id = SessionId(self._next_id + 1)
        self._sessions[session.id] = session
        asyncio.get_running_loop().add_reader(sock.fileno(), self._readable, session)

    def _readable(self, session: _Session) -> None:
        for _ in range(_RECEIVE_BURST):
            if session.id not in self._sessions:
                return
            try:
                packet = receive_packet(session.sock)
            except BlockingIOError:
                return
            except (OSError, ProtocolViolation) as error:
                self._end(session, str(error))
                return
            if not packet.data:
                self._end(session, "the process ended or closed its connection")
                return
            packet.close()  # clients send no descriptors
            try:
                self._dispatch(session, pb.BrokerRequest.FromString(packet.data))
            except (DecodeError, ProtocolViolation) as error:
                self._end(session, f"unreadable request: {error}")

    def _dispatch(self, session: _Session, request: pb.BrokerRequest) -> None:
        if session.participant is None:
            self._join(session, request)
        elif request.WhichOneof("body") == "join":
            raise ProtocolViolation(f"{session} joins a second time")
        else:
            self._handler.received(session.id, session.participant, request)

    def _join(self, session: _Session, request: pb.BrokerRequest) -> None:
        if request.WhichOneof("body") != "join":
            raise ProtocolViolation(f"{request.WhichOneof('body')} came before join")
        claimed = request.join.participant
        try:
            participant = Participant(service=Service(claimed.service), rank=claimed.rank)
        except ValueError:
            raise ProtocolViolation(f"service {claimed.service!r} does not exist") from None
        if request.join.pid != session.pid:
            log.warning(
                "a process claims another pid",
                extra={"claimed": request.join.pid, "pid": session.pid},
            )
        for other in list(self._sessions.values()):
            if other.participant == participant:
                self._end(other, f"replaced by a new connection, of pid {session.pid}")
        session.participant = participant
        joined = self._handler.joined(session.id, participant, session.pid, request.join)
        self.send(session.id, pb.BrokerReply(request_id=request.request_id, joined=joined), ())

    def _flush(self, session: _Session) -> None:
        loop = asyncio.get_running_loop()
        while session.outbox:
            packet = session.outbox[0]
            try:
                send_packet(session.sock, packet.data, packet.fds)
            except BlockingIOError:
                loop.add_writer(session.sock.fileno(), self._flush, session)
                return
            except OSError as error:
                self._end(session, f"the connection broke: {error}")
                return
            session.outbox.popleft()
            packet.close()
        loop.remove_writer(session.sock.fileno())

    def _end(self, session: _Session, reason: str) -> None:
        if self._sessions.pop(session.id, None) is None:
            return
        log.info("session ended", extra={"peer": str(session), "reason": reason})
        loop = asyncio.get_running_loop()
        loop.remove_reader(session.sock.fileno())
        loop.remove_writer(session.sock.fileno())
        session.sock.close()
        for packet in session.outbox:
            packet.close()
        session.outbox.clear()
        if session.participant is not None:
            self._handler.lost(session.id, reason)
