"""The other processes of the node, as the controller calls them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import DeadlineExceeded, FailedPrecondition, RollplexError, Unavailable
from common.ids import WORKERS, Incarnation, Participant, Service, WeightsVersion
from common.transport import open_channel
from protos.rollplex.v1 import broker_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.controller.verdict import code_of, is_fatal, is_retryable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from common.ids import Epoch, RunId
    from common.registry.client import Registry, ServiceEntry
    from services.controller.config import ControllerConfig
    from services.controller.record import RunRecord

Reply = TypeVar("Reply")

_HEALTH_DEADLINE_S = 1.0
_FAILED_PEERS_GRACE_S = 1.0
_BUSY_PAUSE_S = 0.2
_STEP_END_PATIENCE_S = 5.0

ServingProblem = str
"""Why a service cannot take part yet, in words."""


class PeerFailed(RollplexError):
    """A call failed; names the call and the peer.

    Attributes:
        what: the call, in words.
        cause: the error that it ended in.
    """

    def __init__(self, what: str, cause: RollplexError) -> None:
        super().__init__(f"{what}: {cause}")
        self.what = what
        self.cause = cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """What the workers answered.

    Attributes:
        weights_version: the durable version that the learner holds.
        facts: by `participant.fact`.
    """

    weights_version: WeightsVersion
    incarnations: Mapping[Participant, Incarnation]
    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeen:
    """What one worker was doing at the last look."""

    participant: Participant
    phase: str
    group: int | None
    serving: bool


class Fleet:
    """Finds the node's processes in the registry and calls them.

    Calls raise `PeerFailed`; addresses are those of the last look into the registry.
    """

    def __init__(
        self, registry: Registry, expected: Sequence[Participant], config: ControllerConfig
    ) -> None:
        """Args: expected: every process that a run needs, the controller left out."""
        self._registry = registry
        self._expected = tuple(expected)
        self._config = config
        self._entries: dict[Participant, ServiceEntry] = {}
        self._channels: dict[str, Any] = {}

    @property
    def workers(self) -> list[Participant]:
        """Participants that are configured for a run."""
        return [p for p in self._expected if p.service in WORKERS]

    async def close(self) -> None:
        """Close all channels. Idempotent."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def entries(self) -> list[ServiceEntry]:
        """Who is registered now. Raises Unavailable while Redis is away."""
        found = await self._registry.services()
        self._entries = {entry.participant: entry for entry in found}
        live = {entry.grpc_address for entry in found}
        for address in [a for a in self._channels if a not in live]:
            await self._channels.pop(address).close()
        return found

    async def missing(self) -> tuple[ServingProblem, ...]:
        """Every expected process that is not registered, or does not say SERVING itself.

        Raises:
            Unavailable: Redis is away.
        """
        await self.entries()
        problems = await asyncio.gather(*(self._problem(p) for p in self._expected))
        return tuple(problem for problem in problems if problem)

    async def broker(self) -> broker_pb2_grpc.BrokerAsyncStub:
        """The broker's control plane. Raises Unavailable: none is registered."""
        participant = Participant(service=Service.BROKER)
        if participant not in self._entries:
            await self.entries()
        return broker_pb2_grpc.BrokerStub(self._channel(participant))

    async def configure(self, record: RunRecord, epoch: Epoch) -> Configured:
        """Configure all workers at once; they wait for each other's storages.

        Raises:
            PeerFailed: the first error, or a fatal one where there is one.
        """
        request = worker_pb2.ConfigureRequest(
            run_id=record.run_id,
            epoch=epoch,
            recipe_json=record.recipe_json,
            run_dir=record.run_dir,
            resume_from=record.resume_from,
        )
        calls = {p: self._configure_one(p, request) for p in self.workers}
        return _configured(await _every(calls))

    async def save_checkpoint(self, run_id: RunId, epoch: Epoch) -> worker_pb2.SaveCheckpointReply:
        """Have the learner's ranks write a checkpoint of what they hold; rank 0's reply.

        Raises:
            PeerFailed: as `configure`; a rank that waits for the failed one is left to itself then.
        """
        request = worker_pb2.SaveCheckpointRequest(run_id=run_id, epoch=epoch)
        timeout = self._config.failures.checkpoint_deadline_s

        async def one(learner: Participant) -> worker_pb2.SaveCheckpointReply:
            reply: worker_pb2.SaveCheckpointReply = await self._call_when_free(
                learner,
                "checkpoint",
                lambda stub: stub.SaveCheckpoint(request, timeout=timeout),
                # It may not have seen the end of the step yet.
                patience_s=_STEP_END_PATIENCE_S,
            )
            return reply

        learners = [p for p in self.workers if p.service is Service.LEARNER]
        replies = await _every({learner: one(learner) for learner in learners})
        return replies[learners[0]]

    async def release(self, run_id: RunId) -> list[str]:
        """Have every worker give the run up. Returns: what could not be reached, in words."""
        request = worker_pb2.ReleaseRequest(run_id=run_id)
        timeout = self._config.failures.release_deadline_s

        async def one(participant: Participant) -> str:
            try:
                await self._call(
                    participant, "release", lambda stub: stub.Release(request, timeout=timeout)
                )
            except PeerFailed as error:
                return str(error)
            return ""

        problems = await asyncio.gather(*(one(p) for p in self.workers))
        return [problem for problem in problems if problem]

    async def phases(self) -> list[PhaseSeen]:
        """What every worker does at this moment; one that does not answer is not serving."""
        return list(await asyncio.gather(*(self._phase(p) for p in self.workers)))

    async def _phase(self, participant: Participant) -> PhaseSeen:
        request = worker_pb2.GetStatusRequest()
        timeout = self._config.status_deadline_s
        try:
            status: worker_pb2.WorkerStatus = await self._call(
                participant, "status", lambda stub: stub.GetStatus(request, timeout=timeout)
            )
        except PeerFailed:
            return PhaseSeen(participant=participant, phase="away", group=None, serving=False)
        return PhaseSeen(
            participant=participant,
            phase=status.phase,
            group=status.group if status.HasField("group") else None,
            serving=True,
        )

    async def _problem(self, participant: Participant) -> ServingProblem:
        entry = self._entries.get(participant)
        if entry is None:
            return f"{participant} is not registered"
        where = f"{participant} (pid {entry.pid}, {entry.grpc_address})"
        stub = health_pb2_grpc.HealthStub(self._channel(participant))
        try:
            reply = await stub.Check(
                health_pb2.HealthCheckRequest(service=""), timeout=_HEALTH_DEADLINE_S
            )
        except RollplexError:
            return f"{where} does not answer"
        if reply.status != health_pb2.HealthCheckResponse.SERVING:
            name = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
            return f"{where} says {name}"
        return ""

    async def _configure_one(
        self, participant: Participant, request: worker_pb2.ConfigureRequest
    ) -> worker_pb2.ConfigureReply:
        deadline_s = self._config.failures.configure_deadline_s
        reply: worker_pb2.ConfigureReply = await self._call_when_free(
            participant,
            "configure",
            lambda stub: stub.Configure(request, timeout=deadline_s),
            # It may be busy with an earlier Configure, whose caller has gone.
            patience_s=deadline_s,
        )
        return reply

    async def _call_when_free(
        self,
        participant: Participant,
        what: str,
        call: Callable[[Any], Any],
        *,
        patience_s: float,
    ) -> Any:
        give_up_s = asyncio.get_running_loop().time() + patience_s
        while True:
            try:
                return await self._call(participant, what, call)
            except PeerFailed as error:
                busy = isinstance(error.cause, FailedPrecondition)
                if not busy or asyncio.get_running_loop().time() > give_up_s:
                    raise
                await asyncio.sleep(_BUSY_PAUSE_S)

    async def _call(self, participant: Participant, what: str, call: Callable[[Any], Any]) -> Any:
        try:
            return await call(worker_pb2_grpc.WorkerStub(self._channel(participant)))
        except RollplexError as error:
            raise PeerFailed(f"{what} of {participant}", error) from error

    def _channel(self, participant: Participant) -> Any:
        entry = self._entries.get(participant)
        if entry is None:
            raise Unavailable(f"{participant} is not registered", participant=str(participant))
        if entry.grpc_address not in self._channels:
            self._channels[entry.grpc_address] = open_channel(entry.grpc_address)
        return self._channels[entry.grpc_address]


async def _every(
    calls: Mapping[Participant, Coroutine[Any, Any, Reply]],
) -> dict[Participant, Reply]:
    """Call all at once; no call is left when it returns or raises.

    Raises:
        PeerFailed: the first error, or a fatal one where there is one.
    """
    tasks = {participant: asyncio.create_task(call) for participant, call in calls.items()}
    try:
        await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        # The others may know better why, and are about to say so.
        await asyncio.wait(tasks.values(), timeout=_FAILED_PEERS_GRACE_S)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    failures = [
        error
        for task in tasks.values()
        if not task.cancelled() and isinstance(error := task.exception(), PeerFailed)
    ]
    if failures:
        fatal = [f for f in failures if is_fatal(code_of(f.cause), retryable=is_retryable(f.cause))]
        raise (fatal or failures)[0]
    return {participant: task.result() for participant, task in tasks.items()}


def _configured(replies: Mapping[Participant, worker_pb2.ConfigureReply]) -> Configured:
    learner = Participant(service=Service.LEARNER)
    version = replies[learner]
    if not version.HasField("weights_version"):
        raise PeerFailed(
            f"configure of {learner}",
            DeadlineExceeded("the reply does not say which weights version it holds"),
        )
    return Configured(
        weights_version=WeightsVersion(version.weights_version),
        incarnations={p: Incarnation(reply.incarnation) for p, reply in replies.items()},
        facts={f"{p}.{k}": v for p, reply in replies.items() for k, v in reply.facts.items()},
    )
