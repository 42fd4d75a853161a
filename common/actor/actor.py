"""The base of every service's actor.

Invariants: one message is handled at a time; state is touched by the handler only; whatever may
take long runs as a named task, and every task that ends while the actor runs sends exactly one
`TaskEnded`, failure and cancellation included.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from common.actor.machine import StateCell, TransitionTable
from common.actor.mailbox import Mailbox, MailboxClosed
from common.errors import AlreadyExists, FailedPrecondition, RollplexError

if TYPE_CHECKING:
    from collections.abc import Coroutine

log = logging.getLogger(__name__)

Message = TypeVar("Message")

SLOW_HANDLER_S = 0.25
"""A handler that runs longer is logged: it kept health and abort waiting."""


class ActorState(Enum):
    """Life of an actor."""

    CREATED = "created"
    """Made; the mailbox already takes messages."""
    RUNNING = "running"
    """Inside `run`, handling messages."""
    STOPPED = "stopped"
    """Ended by `stop`; no task is left."""
    FAILED = "failed"
    """Ended by an error in a handler; `run` raised it."""


TRANSITIONS = TransitionTable(
    "actor",
    {
        (ActorState.CREATED, ActorState.RUNNING): "run",
        (ActorState.CREATED, ActorState.STOPPED): "stop before run",
        (ActorState.RUNNING, ActorState.STOPPED): "stop, or run was cancelled",
        (ActorState.RUNNING, ActorState.FAILED): "a handler raised",
    },
)


class TaskCancelled(RollplexError):
    """A task was cancelled by its actor before it ended."""


@dataclass(slots=True, kw_only=True)
class _Running:
    """A task in `Actor._tasks`, from `spawn` until its work has ended."""

    work: Coroutine[Any, Any, Any]
    guard: asyncio.Task[None] | None = None
    started: bool = False
    cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnded:
    """A task of this actor has ended. `error` is None exactly when it returned `result`."""

    name: str
    result: Any = None
    error: Exception | None = None


class Actor(ABC, Generic[Message]):
    """One mailbox, one message at a time."""

    def __init__(self, name: str, *, mailbox_capacity: int = 1024) -> None:
        """Args: name: for logs and errors. mailbox_capacity: messages that may wait."""
        self.name = name
        self.mailbox: Mailbox[Message | TaskEnded] = Mailbox(name, mailbox_capacity)
        self._cell = StateCell(TRANSITIONS, name, ActorState.CREATED)
        self._tasks: dict[str, _Running] = {}
        self._group: asyncio.TaskGroup | None = None
        self._runner: asyncio.Task[Any] | None = None
        self._ended = asyncio.Event()

    @property
    def state(self) -> ActorState:
        """Where in its life the actor is."""
        return self._cell.state

    @property
    def running_tasks(self) -> frozenset[str]:
        """Names of the tasks that have not ended."""
        return frozenset(self._tasks)

    @abstractmethod
    async def handle(self, message: Message | TaskEnded) -> None:
        """Handle one message. What it raises ends the actor, so expected errors are caught here."""

    async def run(self) -> None:
        """Handle messages until `stop`, then cancel what still runs.

        Raises:
            Exception: what a handler raised; the actor is FAILED.
        """
        self._cell.move(ActorState.RUNNING, "run")
        self._runner = asyncio.current_task()
        failure: Exception | None = None
        try:
            async with asyncio.TaskGroup() as self._group:
                try:
                    await self._handle_all()
                except Exception as error:  # noqa: BLE001 - raised again once the tasks are gone
                    failure = error
                finally:
                    self.mailbox.close()
                    for name in self._tasks:
                        self.cancel(name)
        finally:
            # A guard that was cancelled before its first line has not closed its work.
            for running in self._tasks.values():
                running.work.close()
            self._tasks.clear()
            end = ActorState.STOPPED if failure is None else ActorState.FAILED
            self._cell.move(end, repr(failure) if failure else "stop")
            self._ended.set()
        if failure is not None:
            raise failure

    async def stop(self) -> None:
        """Handle what is in the mailbox, cancel the tasks, end `run`. Idempotent.

        Returns when `run` has ended; called from a handler, at once.
        """
        self.mailbox.close()
        if self.state is ActorState.CREATED:
            self._cell.move(ActorState.STOPPED, "stop")
            self._ended.set()
        if asyncio.current_task() is not self._runner:
            await self._ended.wait()

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` beside the handlers; its end comes back as one `TaskEnded`.

        Raises:
            AlreadyExists: a task of this name has not ended.
            FailedPrecondition: the actor is not running.
        """
        if self._group is None or self.state is not ActorState.RUNNING or self.mailbox.closed:
            work.close()
            raise FailedPrecondition(f"actor {self.name} is {self.state.value}, task {name} is not")
        if name in self._tasks:
            work.close()
            raise AlreadyExists(f"actor {self.name} already runs a task named {name}")
        running = self._tasks[name] = _Running(work=work)
        running.guard = self._group.create_task(self._run_task(name, running), name=name)

    def cancel(self, name: str) -> bool:
        """Cancel a task; its `TaskEnded` carries `TaskCancelled`. False: no such task runs."""
        running = self._tasks.get(name)
        if running is None or running.guard is None:
            return False
        # asyncio drops a task that is cancelled before its first line, and its message with it.
        running.cancelled = True
        if running.started:
            running.guard.cancel()
        return True

    async def _handle_all(self) -> None:
        while True:
            try:
                message = await self.mailbox.get()
            except MailboxClosed:
                return
            began_s = time.monotonic()
            await self.handle(message)
            took_s = time.monotonic() - began_s
            if took_s > SLOW_HANDLER_S:
                log.warning(
                    "slow handler",
                    extra={
                        "actor": self.name,
                        "handled": type(message).__name__,
                        "took_s": round(took_s, 3),
                    },
                )

    async def _run_task(self, name: str, running: _Running) -> None:
        running.started = True
        cancelled = TaskEnded(name=name, error=TaskCancelled(f"task {name} was cancelled"))
        try:
            ended = cancelled
            if not running.cancelled:
                ended = TaskEnded(name=name, result=await running.work)
        except asyncio.CancelledError:
            ended = cancelled
        except Exception as error:  # noqa: BLE001 - the handler decides what it means
            ended = TaskEnded(name=name, error=error)
        finally:
            running.work.close()
            del self._tasks[name]
        try:
            await self.mailbox.put(ended)
        except MailboxClosed:
            log.debug("task ended after stop", extra={"actor": self.name, "task": name})
