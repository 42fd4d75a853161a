"""Which ranks of two services work with each other, be there equally many or not.

Training and rollout have equally many replicas, or one side has a multiple of the other's. A family
is a replica of the side with fewer, and those of the other side that share groups with it: each
group is bound to a replica of either side, of one family.

Rank r of n of a replica reads rank ``r * m // n`` of m of every replica of another service in its
family: with equal numbers the same rank; of fewer ranks the one whose part of the heads its own
lies in, where they nest; of more ranks the first of those that have its part. A rank may have no
reader.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.ids import WORKERS, Participant, Service
from common.layouts.rows import Cut

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Partners:
    """Attributes:
    ranks: how many a replica of each service has; 1 where it is not named.
    replicas: of each service, likewise.
    """

    ranks: Mapping[Service, int] = field(default_factory=dict)
    replicas: Mapping[Service, int] = field(default_factory=dict)

    @classmethod
    def alike(cls, *, degree: int, replicas: int) -> Partners:
        """All services that compute have as many ranks and replicas."""
        return cls(dict.fromkeys(WORKERS, degree), dict.fromkeys(WORKERS, replicas))

    def count(self, service: Service) -> int:
        """Ranks of a replica of a service."""
        return self.ranks.get(service, 1)

    def replica_count(self, service: Service) -> int:
        """Replicas of a service."""
        return self.replicas.get(service, 1)

    def replica(self, one: Participant) -> int:
        """Which replica of its service a process belongs to."""
        return one.rank // self.count(one.service)

    def cut(self, one: Participant) -> Cut:
        """Which of the ranks of its replica a process is."""
        ranks = self.count(one.service)
        return Cut(one.rank % ranks, ranks)

    def all(self, service: Service, *, replica: int = 0) -> tuple[Participant, ...]:
        """All ranks of a replica of a service."""
        first = replica * self.count(service)
        ranks = range(first, first + self.count(service))
        return tuple(Participant(service=service, rank=rank) for rank in ranks)

    def everyone(self, service: Service) -> tuple[Participant, ...]:
        """All ranks of all replicas of a service."""
        ranks = range(self.count(service) * self.replica_count(service))
        return tuple(Participant(service=service, rank=rank) for rank in ranks)

    # ---------------------------------------------------------------- replicas

    def bound(self, index: int, service: Service) -> int:
        """The replica of a service that has the groups of an index: in turn, over all families."""
        turns = max(self.replicas.values(), default=1)
        return index % turns * self.replica_count(service) // turns

    @property
    def families(self) -> int:
        """How many there are."""
        return min(self.replicas.values(), default=1)

    def family(self, one: Participant) -> int:
        """Which family a process belongs to."""
        return self.replica(one) * self.families // self.replica_count(one.service)

    def met(self, one: Participant, service: Service) -> range:
        """The replicas of a service in a process's family; on its own side, its own replica."""
        if (service is Service.ROLLOUT) == (one.service is Service.ROLLOUT):
            return range(self.replica(one), self.replica(one) + 1)
        each = self.replica_count(service) // self.families
        first = self.family(one) * each
        return range(first, first + each)

    # ---------------------------------------------------------------- ranks

    def partner(
        self, reader: Participant, service: Service, *, replica: int | None = None
    ) -> Participant:
        """The rank of a service whose leases and events a process reads.

        Args: replica: of that service; None: the first in the reader's family.
        """
        if service not in self.ranks:
            return Participant(service=service)
        rank, ranks = reader.rank % self.count(reader.service), self.count(reader.service)
        if replica is None:
            replica = self.met(reader, service).start
        return self.all(service, replica=replica)[rank * self.count(service) // ranks]

    def readers(
        self, of: Participant, service: Service, *, replica: int | None = None
    ) -> tuple[Participant, ...]:
        """The ranks of a service that read this process; there may be none.

        Args: replica: of that service; None: the first in the process's family.
        """
        if replica is None:
            replica = self.met(of, service).start
        own = self.replica(of)
        return tuple(
            one
            for one in self.all(service, replica=replica)
            if self.partner(one, of.service, replica=own) == of
        )
