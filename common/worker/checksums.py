"""Checksums of the weights that a worker reads, each role under a read hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.events.bodies import ModelRole
from common.weights.binding import local_part
from common.weights.checksums import checksums
from common.worker.device import copied_aside
from common.worker.threads import in_thread
from common.worker.weights import REFERENCE_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from common.ids import WeightsVersion
    from common.worker.work import ReadWeights, RunWork


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChecksums:
    """Attributes: checksums: by the parameter's name, tied ones under each of their names; of
    pieces as `Piece.named` calls them, where there are several ranks."""

    role: ModelRole
    version: WeightsVersion
    checksums: Mapping[str, str]


async def checksum_weights(run: RunWork, policy_version: WeightsVersion) -> list[RoleChecksums]:
    """Checksums of all weights that a run has in this process.

    A step may run meanwhile: it reads too, and its update waits. Weights that are parked come back,
    and are parked again. A cancellation ends a wait for weights; while they are read, it waits.

    Raises:
        StaleVersion: the policy is past the version.
        StorageTorn: contents are undefined.
        BrokerTimeout: the version was not published in time.
    """
    return [await _checksums(weights, policy_version) for weights in run.read_weights()]


async def _checksums(weights: ReadWeights, policy_version: WeightsVersion) -> RoleChecksums:
    reference = weights.role is ModelRole.REFERENCE
    version = REFERENCE_VERSION if reference else policy_version
    model = weights.model
    parts = _cut(weights)
    try:
        with await weights.storage.hold_read(version, passing=True):
            found = await in_thread(lambda: copied_aside(model.device, lambda: checksums(parts)))
    finally:
        await in_thread(weights.storage.park_again)
    return RoleChecksums(role=weights.role, version=version, checksums=found)


def _cut(weights: ReadWeights) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, parameter in weights.model.named_parameters():
        part = local_part(parameter)
        pieces = weights.pieces.get(name)
        if pieces is None:
            found[name] = part
        else:
            found |= {piece.named(name): piece.of(part) for piece in pieces}
    return found
