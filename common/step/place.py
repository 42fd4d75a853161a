"""Where a rank of a service stands among tensor-parallel ranks and data-parallel replicas."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank's place: its number is replica x `degree` + tensor rank.

    Attributes:
        rank: its number among all ranks of its service.
        degree: tensor-parallel ranks of a replica.
        replicas: data-parallel replicas of those.
    """

    rank: int = 0
    degree: int = 1
    replicas: int = 1

    @property
    def world(self) -> int:
        """All ranks of the service."""
        return self.degree * self.replicas

    @property
    def replica(self) -> int:
        """Which replica it belongs to."""
        return self.rank // self.degree

    @property
    def tensor_rank(self) -> int:
        """Its number in the replica."""
        return self.rank % self.degree

    @property
    def in_replica(self) -> Place:
        """The same where its replica is the only one."""
        return Place(rank=self.tensor_rank, degree=self.degree)

    @property
    def leads(self) -> bool:
        """Whether it decides for its replica."""
        return self.tensor_rank == 0

    @property
    def leader(self) -> int:
        """The rank that decides for its replica."""
        return self.replica * self.degree
