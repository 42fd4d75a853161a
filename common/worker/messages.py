"""What a worker's mailbox takes. An ask carries the future of its answer; the rest are tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

    from common.config.recipe import Recipe
    from common.events import Event
    from common.ids import Epoch, RunId, WeightsVersion
    from common.worker.checksums import RoleChecksums
    from common.worker.work import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class Configure:
    """Ask: load the run, or make sure that it is loaded."""

    run_id: RunId
    epoch: Epoch
    recipe: Recipe
    run_dir: Path
    resume_from: Path | None
    answer: asyncio.Future[Prepared]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Ask: give up the run."""

    run_id: RunId
    answer: asyncio.Future[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiesce:
    """Ask: start nothing more; answered when nothing runs."""

    answer: asyncio.Future[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutDown:
    """Ask: abandon the step, give up the run, take nothing more; answered when that is done."""

    answer: asyncio.Future[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint:
    """Ask: write a checkpoint between two steps."""

    run_id: RunId
    epoch: Epoch
    answer: asyncio.Future[tuple[Path, WeightsVersion]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksumWeights:
    """Ask: checksums of the weights that the worker reads; a step may be running."""

    run_id: RunId
    policy_version: WeightsVersion
    answer: asyncio.Future[list[RoleChecksums]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventArrived:
    """Tell: the next event of the node's order."""

    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLost:
    """Tell: broker or hub is gone, and every lease and storage with it."""

    link: int
    reason: str


Message = (
    Configure
    | Release
    | Quiesce
    | ShutDown
    | SaveCheckpoint
    | ChecksumWeights
    | EventArrived
    | LinkLost
)
