"""What the bootstrap gives to a service, and what it expects of one."""

from __future__ import annotations

import os
import time
import uuid
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, Gauge, Info, ProcessCollector

from common.ids import Incarnation, Participant
from common.registry.client import Registry, ServiceEntry
from common.service.http import Verdict
from common.service.lifecycle import Lifecycle, new_lifecycle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.config.deployment import Deployment
    from common.transport import BoundServicer

STALLED_AFTER_S = 10.0
"""A loop that has not run for this long answers neither health nor abort: not healthy."""

_ANY_ADDRESS = ("0.0.0.0", "::", "[::]")  # noqa: S104 - compared with, not bound to


class Service(Protocol):
    """One service, built and ready to be served.

    The bootstrap calls `run` once; on SIGTERM `drain`, then cancels `run`, then `close`. After a
    failure `drain` is left out. `drain` and `close` are idempotent.
    """

    @property
    def servicers(self) -> Sequence[BoundServicer]:
        """What it serves by gRPC."""

    async def run(self) -> None:
        """Work until cancelled. Returning or raising ends the process with an error."""

    async def drain(self) -> None:
        """Take no new work and let the running work end; cut off at the deadline."""

    async def close(self) -> None:
        """Flush events, give leases back, close sockets."""


class ServiceContext:
    """One process of a service, as its parts see it.

    Attributes:
        participant: who this process is.
        deployment: the node.
        incarnation: this life of the process.
        registry: the other processes.
        metrics: what `/metrics` shows; services register theirs here.
        lifecycle: where in its life the process is; moved by the bootstrap only.
    """

    def __init__(self, participant: Participant, deployment: Deployment) -> None:
        self.participant = participant
        self.deployment = deployment
        self.incarnation = Incarnation(uuid.uuid4().hex)
        self.registry = Registry.of(deployment)
        self.lifecycle = new_lifecycle(str(participant))
        self.metrics = CollectorRegistry()
        ProcessCollector(registry=self.metrics)
        Info("rollplex_service", "Which process this is.", registry=self.metrics).info(
            {
                "participant": str(participant),
                "node": deployment.node,
                "incarnation": self.incarnation,
            }
        )
        self._lag = Gauge(
            "rollplex_event_loop_lag_seconds",
            "How late the event loop ran at the last beat.",
            registry=self.metrics,
        )
        self._phase = ""
        self._trouble = ""
        self._beat_s = time.monotonic()

    @property
    def phase(self) -> str:
        """What the process does, in a word or two; others see it in the registry."""
        return self._phase or self.lifecycle.state.value

    def set_phase(self, phase: str) -> None:
        """Report what the process does; visible within a heartbeat. Empty: its lifecycle."""
        self._phase = phase

    def set_trouble(self, trouble: str) -> None:
        """Report what keeps the process from working although it serves; empty: nothing."""
        self._trouble = trouble

    def beat(self, lag_s: float) -> None:
        """The event loop runs, and this much later than it should."""
        self._beat_s = time.monotonic()
        self._lag.set(lag_s)

    def health(self) -> Verdict:
        """Whether the process can take work. Called from any thread."""
        silent_s = time.monotonic() - self._beat_s
        state = self.lifecycle.state
        if state is Lifecycle.SERVING and silent_s > STALLED_AFTER_S:
            return Verdict(
                healthy=False, reason=f"stalled: the event loop has not run for {silent_s:.0f} s"
            )
        if state is Lifecycle.SERVING and self._trouble:
            return Verdict(healthy=False, reason=self._trouble)
        return Verdict(healthy=state is Lifecycle.SERVING, reason=state.value)

    def entry(self, *, grpc_address: str, http_address: str) -> ServiceEntry:
        """This process as the registry shows it."""
        return ServiceEntry(
            participant=self.participant,
            node=self.deployment.node,
            pid=os.getpid(),
            grpc_address=self._reachable(grpc_address),
            http_address=self._reachable(http_address),
            incarnation=self.incarnation,
            serving=self.lifecycle.state is Lifecycle.SERVING,
            phase=self.phase,
        )

    def _reachable(self, address: str) -> str:
        host, _, port = address.rpartition(":")
        return f"{self.deployment.node}:{port}" if host in _ANY_ADDRESS else address
