"""Whether all processes of a node read the same weights, by their checksums."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from common.errors import Stale, Unavailable
from common.events.bodies import ModelRole
from common.ids import WORKERS, Participant, Service
from common.transport import open_channel
from protos.rollplex.v1 import worker_pb2 as pb
from protos.rollplex.v1 import worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollplex.models import Cluster

_OWNERS = {ModelRole.POLICY: Service.LEARNER, ModelRole.REFERENCE: Service.REFERENCE}
"""Who writes a role's weights, and is taken to be right where as many disagree as agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerWeights:
    """One role's weights as one process reads them.

    Attributes:
        consumer: the process, such as ``rollout/0``.
        role: ``policy`` or ``reference``.
        version: number of updates that made them.
        checksums: by the parameter's name, tied ones under each of their names. Of several ranks,
            by pieces that a process holds whole or not at all: ``name[0:32, 0:64]``.
    """

    consumer: str
    role: ModelRole
    version: int
    checksums: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsDifference:
    """A tensor that one process reads otherwise than the others.

    Attributes:
        tensor: parameter, or a piece of one, as in `ConsumerWeights.checksums`.
        checksum: of what it reads; None: it has nothing of such a tensor.
        expected: of what most read, or the owner; None: they have no such tensor.
    """

    tensor: str
    role: ModelRole
    consumer: str
    version: int
    checksum: str | None
    expected: str | None


@dataclass(frozen=True)
class WeightsReport:
    """What all processes of a run read at one version.

    Attributes:
        read: by role, the owner of the weights first.
    """

    run_id: str
    read: tuple[ConsumerWeights, ...]

    @cached_property
    def differences(self) -> tuple[WeightsDifference, ...]:
        """Every tensor that differs, by role and name; empty: all read the same."""
        found: list[WeightsDifference] = []
        for role in ModelRole:
            found += _differences([one for one in self.read if one.role is role])
        return tuple(found)


async def read_weights(
    cluster: Cluster, run_id: str, policy_version: int, *, deadline_s: float
) -> WeightsReport:
    """Ask every worker for its checksums, all at the same time.

    Raises:
        Unavailable: a worker is not registered, or does not answer.
        FailedPrecondition: one is not configured for the run.
        Stale: the policy is past the version.
    """
    addresses = {
        Participant.parse(entry.participant): entry.grpc_address for entry in cluster.services
    }
    missing = set(WORKERS) - {participant.service for participant in addresses}
    if missing:
        raise Unavailable(f"not registered with the controller: {', '.join(sorted(missing))}")
    request = pb.ChecksumWeightsRequest(run_id=run_id, policy_version=policy_version)
    answers = await asyncio.gather(
        *(
            _ask(participant, address, request, deadline_s)
            for participant, address in addresses.items()
            if participant.service in WORKERS
        ),
        return_exceptions=True,
    )
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, Stale)):
        raise error
    read = [one for answer in answers if isinstance(answer, list) for one in answer]
    return WeightsReport(run_id=run_id, read=tuple(sorted(read, key=_order)))


def _order(one: ConsumerWeights) -> tuple[bool, bool, str]:
    service = Participant.parse(one.consumer).service
    return one.role is ModelRole.REFERENCE, service is not _OWNERS[one.role], one.consumer


async def _ask(
    participant: Participant, address: str, request: pb.ChecksumWeightsRequest, deadline_s: float
) -> list[ConsumerWeights]:
    channel = open_channel(address, deadline_s=deadline_s)
    try:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        reply = await stub.ChecksumWeights(request)
    finally:
        await channel.close()
    return [
        ConsumerWeights(
            consumer=str(participant),
            role=ModelRole(one.role),
            version=one.version,
            checksums=dict(one.checksums),
        )
        for one in reply.roles
    ]


def _differences(read: Sequence[ConsumerWeights]) -> list[WeightsDifference]:
    """Of processes that read one role; those of the owner are the first of them."""
    has = {one.consumer: {_parameter(name) for name in one.checksums} for one in read}
    found: list[WeightsDifference] = []
    for name in sorted({name for one in read for name in one.checksums}):
        # every process has a part of each parameter
        concerned = [
            one
            for one in read
            if name in one.checksums or _parameter(name) not in has[one.consumer]
        ]
        # of equally common ones, the first that was seen
        ((expected, _),) = Counter(one.checksums.get(name) for one in concerned).most_common(1)
        found += [
            WeightsDifference(
                tensor=name,
                role=one.role,
                consumer=one.consumer,
                version=one.version,
                checksum=one.checksums.get(name),
                expected=expected,
            )
            for one in concerned
            if one.checksums.get(name) != expected
        ]
    return found


def _parameter(piece: str) -> str:
    """Whose piece it is."""
    return piece.partition("[")[0]
