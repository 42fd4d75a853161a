"""Frames between the rollout service and the engine's host, over a Unix stream socket.

A frame is its length, then a JSON object and tensors in the form of safetensors. Descriptors travel
with the frame's first byte. Sender and receiver may run on different versions of Python and torch.
"""

from __future__ import annotations

import json
import select
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safetensors.torch import load, save

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

_LENGTH = struct.Struct("<Q")
_MESSAGE = "message"
_MOST_DESCRIPTORS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message.

    Attributes:
        kind: what it says, one of `services.rollout.engines.sglang.messages`.
        body: JSON values by name.
        tensors: on the host.
        descriptors: the receiver's own, to be closed by it.
    """

    kind: str
    body: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    descriptors: Sequence[int] = ()


class ChannelClosed(Exception):
    """The other side has closed its end, or ended."""


def encoded(frame: Frame) -> bytes:
    """A frame without its descriptors."""
    message = json.dumps({"kind": frame.kind, "body": dict(frame.body)})
    tensors = {name: tensor.contiguous() for name, tensor in frame.tensors.items()}
    return save(tensors, metadata={_MESSAGE: message})


def decoded(data: bytes, descriptors: Sequence[int] = ()) -> Frame:
    """What `encoded` made, with descriptors that came beside it."""
    header_bytes = _LENGTH.unpack_from(data)[0]
    header = json.loads(data[_LENGTH.size : _LENGTH.size + header_bytes])
    message = json.loads(header["__metadata__"][_MESSAGE])
    return Frame(
        kind=message["kind"], body=message["body"], tensors=load(data), descriptors=descriptors
    )


def send(channel: socket.socket, frame: Frame) -> None:
    """Send a frame; its descriptors stay the sender's. Blocks while the socket is full.

    Raises: ChannelClosed; TimeoutError after the socket's own timeout.
    """
    data = encoded(frame)
    try:
        sent = socket.send_fds(channel, [_LENGTH.pack(len(data))], list(frame.descriptors))
        assert sent == _LENGTH.size, "a frame's length was torn"
        channel.sendall(data)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise ChannelClosed(str(error)) from error


def receive(channel: socket.socket) -> Frame:
    """Wait for a frame.

    Raises: ChannelClosed; TimeoutError after the socket's own timeout.
    """
    try:
        head, descriptors, _, _ = socket.recv_fds(channel, _LENGTH.size, _MOST_DESCRIPTORS)
        head += _exactly(channel, _LENGTH.size - len(head)) if head else b""
        if not head:
            raise ChannelClosed("the other side has ended")
        data = _exactly(channel, _LENGTH.unpack(head)[0])
    except ConnectionResetError as error:
        raise ChannelClosed(str(error)) from error
    return decoded(data, tuple(descriptors))


def has_frame(channel: socket.socket, *, within_s: float) -> bool:
    """Whether a frame, or the channel's end, comes within this time."""
    # not `select`, which takes no descriptor beyond 1023
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


def _exactly(channel: socket.socket, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    view, done = memoryview(data), 0
    while done < size_bytes:
        got = channel.recv_into(view[done:])
        if not got:
            raise ChannelClosed("the other side ended within a frame")
        done += got
    return bytes(data)
