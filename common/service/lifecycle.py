"""The states of a service process."""

from __future__ import annotations

from enum import StrEnum

from common.actor.machine import StateCell, TransitionTable


class Lifecycle(StrEnum):
    """Where in its life a service process is."""

    CREATED = "created"
    """The process runs; nothing is open yet."""
    STARTING = "starting"
    """Opening sockets, building the service; health says NOT_SERVING."""
    SERVING = "serving"
    """Registered; health says SERVING."""
    DRAINING = "draining"
    """Deregistered, NOT_SERVING; running work may end until the deadline."""
    STOPPED = "stopped"
    """Everything is closed; the process exits with 0."""
    FAILED = "failed"
    """An error ended it; the process exits with 1."""


TRANSITIONS = TransitionTable(
    "service",
    {
        (Lifecycle.CREATED, Lifecycle.STARTING): "the process begins",
        (Lifecycle.STARTING, Lifecycle.SERVING): "the service is built and listens",
        (Lifecycle.STARTING, Lifecycle.DRAINING): "SIGTERM while starting",
        (Lifecycle.SERVING, Lifecycle.DRAINING): "SIGTERM or SIGINT",
        (Lifecycle.DRAINING, Lifecycle.STOPPED): "drained, or the deadline passed",
        (Lifecycle.CREATED, Lifecycle.FAILED): "an error",
        (Lifecycle.STARTING, Lifecycle.FAILED): "an error",
        (Lifecycle.SERVING, Lifecycle.FAILED): "an error",
        (Lifecycle.DRAINING, Lifecycle.FAILED): "an error",
    },
)


def new_lifecycle(key: str) -> StateCell[Lifecycle]:
    """The lifecycle of one process, CREATED."""
    return StateCell(TRANSITIONS, key, Lifecycle.CREATED)
