"""A bounded queue with one reader. Nothing is dropped: writers wait, or are refused."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from common.errors import FailedPrecondition, ResourceExhausted

Message = TypeVar("Message")


class MailboxFull(ResourceExhausted):
    """`offer` found no room; the message was not taken."""

    retryable = True


class MailboxClosed(FailedPrecondition):
    """The mailbox takes no messages any more."""


class Mailbox(Generic[Message]):
    """First in, first out, for the tasks of one event loop.

    `put` waits for room, so it may not be awaited by the reader itself: use `offer` there.
    """

    def __init__(self, name: str, capacity: int) -> None:
        """Args: name: for errors. capacity: most messages that wait, at least 1."""
        assert capacity >= 1, capacity
        self.name = name
        self.capacity = capacity
        self._messages: deque[Message] = deque()
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def closed(self) -> bool:
        """Whether `close` was called; messages taken before it are still read."""
        return self._closed

    async def put(self, message: Message) -> None:
        """Append; waits while full.

        Raises:
            MailboxClosed: closed before there was room.
        """
        while len(self._messages) >= self.capacity and not self._closed:
            self._writable.clear()
            await self._writable.wait()
        self.offer(message)

    def offer(self, message: Message) -> None:
        """Append without waiting for room.

        Raises:
            MailboxFull: there is none.
            MailboxClosed: closed.
        """
        if self._closed:
            raise MailboxClosed(
                f"mailbox {self.name} is closed; {type(message).__name__} was not taken"
            )
        if len(self._messages) >= self.capacity:
            raise MailboxFull(
                f"mailbox {self.name} is full with {self.capacity} messages; "
                f"{type(message).__name__} was not taken",
                mailbox=self.name,
            )
        self._messages.append(message)
        self._readable.set()

    async def get(self) -> Message:
        """Take the oldest message; waits while empty.

        Raises:
            MailboxClosed: closed and empty.
        """
        while not self._messages:
            if self._closed:
                raise MailboxClosed(f"mailbox {self.name} is closed and empty")
            self._readable.clear()
            await self._readable.wait()
        message = self._messages.popleft()
        self._writable.set()
        return message

    def close(self) -> None:
        """Take no more messages. Idempotent."""
        self._closed = True
        self._readable.set()
        self._writable.set()
