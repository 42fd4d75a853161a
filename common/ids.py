"""Identities that cross module borders. Each is its own type, so that they cannot be mixed up."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

RunId = NewType("RunId", str)
"""A training run; unique in one Redis."""
StepIndex = NewType("StepIndex", int)
"""Step s turns weights version s into s + 1."""
Epoch = NewType("Epoch", int)
"""The attempt at a step; grows for the whole life of a run, never used twice."""
GroupId = NewType("GroupId", int)
"""Position of a prompt among the step's prompts; with the step, the sampling id."""
WeightsVersion = NewType("WeightsVersion", int)
"""Number of updates that made these weights."""
LeaseId = NewType("LeaseId", int)
"""A lease of one broker incarnation; never used twice in it."""
Incarnation = NewType("Incarnation", str)
"""One life of one process."""

NO_GROUP = GroupId(-1)


class Service(StrEnum):
    """The six kinds of process."""

    CONTROLLER = "controller"
    BROKER = "broker"
    ROLLOUT = "rollout"
    PREFIX_ENCODER = "prefix-encoder"
    REFERENCE = "reference"
    LEARNER = "learner"


WORKERS: tuple[Service, ...] = (
    Service.ROLLOUT,
    Service.PREFIX_ENCODER,
    Service.REFERENCE,
    Service.LEARNER,
)
"""Services that take part in a step, one process of each per rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """One process of one service: what leases are granted to and events are sent by."""

    service: Service
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.service}/{self.rank}"

    @classmethod
    def parse(cls, name: str) -> Participant:
        """Read ``service/rank``. Raises ValueError on anything else."""
        service, _, rank = name.partition("/")
        return cls(service=Service(service), rank=int(rank))
