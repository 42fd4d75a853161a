"""What a worker knows of the run that it is configured for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from common.config.recipe import spills
from common.step.partners import Partners
from common.step.place import Place
from common.tensors.parts import RANK

if TYPE_CHECKING:
    from pathlib import Path

    from common.config.recipe import Recipe
    from common.ids import Participant, RunId, Service
    from common.registry.runs import RunLedger
    from common.step.plan import PlannedGroup
    from common.tensors.client import BrokerClient
    from common.worker.push_link import PushLink
    from common.worker.ranks import Ranks

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """One worker's view of one run; valid for one connection to the broker."""

    run_id: RunId
    recipe: Recipe
    run_dir: Path
    participant: Participant
    device: torch.device
    broker: BrokerClient
    ledger: RunLedger
    resume_from: Path | None
    """Checkpoint folder to continue from when nothing newer is durable."""
    engine_python: Path | None = None
    """Interpreter that has SGLang; None: this process's own."""
    governed: bool = False
    """Whether background work runs on shares of the GPU's SMs."""
    place: Place = field(default_factory=Place)
    """Among the ranks of this service."""
    joined: Ranks | None = None
    """Those that it has collectives with; None: there are none."""
    partners: Partners = field(default_factory=Partners)
    """Which ranks of the services work with each other."""
    push: PushLink | None = None
    """Of a rank of learner and rollout, where the latter has weights of its own, to the other."""

    @property
    def degree(self) -> int:
        """Tensor-parallel ranks of this replica."""
        return self.place.degree

    @property
    def arena_ranks(self) -> int:
        """Ranks of this replica whose leases and storages are of one arena: on GPUs each has its
        own."""
        return 1 if self.device.type == "cuda" else self.degree

    @property
    def leads(self) -> bool:
        """Whether this is the rank that decides and that speaks for its replica."""
        return self.place.leads

    @property
    def speaks_for_all(self) -> bool:
        """Whether this is the rank that speaks for all replicas."""
        return self.place.rank == 0

    @property
    def ranks(self) -> tuple[Participant, ...]:
        """All ranks of this service in this replica."""
        return self.partners.all(self.participant.service, replica=self.place.replica)

    def storage_name(self, name: str, rank: int | None = None) -> str:
        """A storage of the run, of this rank if none is given: each has its own."""
        rank = self.participant.rank if rank is None else rank
        return name if rank == 0 else f"{name}{RANK}{rank}"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the compute weights."""
        return DTYPES[self.recipe.model.dtype]

    @property
    def accumulator_dtype(self) -> torch.dtype:
        """Dtype of masters, moments and gradients: float32, or float64 for float64 weights."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    @property
    def spills_optimizer(self) -> bool:
        """Whether the optimizer's state leaves the device while no update needs it."""
        return spills(self.recipe.training.spill_optimizer, self.device.type)

    @property
    def checkpoints_vision(self) -> bool:
        """Whether a tower that trains keeps its blocks' inputs only."""
        training = self.recipe.training
        wanted = training.vision_checkpointing
        by_itself = self.device.type == "cuda" if wanted == "auto" else wanted
        return training.activation_checkpointing or by_itself

    def leave(self) -> None:
        """Give up the communicators. Blocks: those of NCCL end their threads first."""
        if self.push is not None:
            self.push.close()
        if self.joined is not None:
            self.joined.leave()

    def abort(self) -> None:
        """See `Ranks.abort`."""
        if self.push is not None:
            self.push.close()
        if self.joined is not None:
            self.joined.abort()

    def peer(self, service: Service) -> Participant:
        """The process of another service that this one reads, of several replicas in the first."""
        return self.partners.partner(self.participant, service)

    def readers(self, service: Service, group: PlannedGroup) -> tuple[Participant, ...]:
        """The processes of another service that read what this one makes of a group; there may be
        none."""
        replica = group.replica_of(service)
        return self.partners.readers(self.participant, service, replica=replica)
