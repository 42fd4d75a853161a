"""ZeroMQ sockets on private Unix paths."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import zmq
import zmq.asyncio

from common.errors import FailedPrecondition


def bind_private(socket: zmq.asyncio.Socket, address: str) -> None:
    """Bind to an `ipc://` path that only this user can open; an older socket file is replaced.

    Raises:
        FailedPrecondition: the path cannot be bound.
    """
    assert address.startswith("ipc://"), address
    # The file must not be open to others even for the moment before a chmod.
    earlier_mask = os.umask(0o177)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise FailedPrecondition(f"cannot listen on {address}: {error}") from error
    finally:
        os.umask(earlier_mask)
    Path(address.removeprefix("ipc://")).chmod(0o600)


def send_now(socket: zmq.asyncio.Socket, *frames: bytes) -> None:
    """Hand a message to the socket's queue without waiting.

    Raises:
        zmq.Again: the queue is full.
        zmq.ZMQError: with EHOSTUNREACH, a ROUTER does not know the peer.
    """
    sent = socket.send_multipart(frames, flags=zmq.NOBLOCK)
    assert isinstance(sent, asyncio.Future)
    assert sent.done(), "a send without waiting is decided at once"
    sent.result()


def remove_socket_file(address: str) -> None:
    """Remove the file of an `ipc://` address. Idempotent."""
    Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
