"""Which ranks of two services work with each other, be there equally many or not.

Rank r of n of a replica reads rank ``r * m // n`` of m of the same replica of another service: with
equal numbers the same rank; of fewer ranks the one whose part of the heads its own lies in, where
they nest; of more ranks the first of those that have its part. So each rank reads one rank of every
service, and may have no reader.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.ids import Participant, Service
from common.layouts.rows import Cut

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Partners:
    """Attributes: ranks: how many a replica of each service has; 1 where it is not named."""

    ranks: Mapping[Service, int] = field(default_factory=dict)

    def count(self, service: Service) -> int:
        """Ranks of a replica of a service."""
        return self.ranks.get(service, 1)

    def cut(self, one: Participant) -> Cut:
        """Which of the ranks of its replica a process is."""
        ranks = self.count(one.service)
        return Cut(one.rank % ranks, ranks)

    def all(self, service: Service, *, replica: int = 0) -> tuple[Participant, ...]:
        """All ranks of a replica of a service."""
        first = replica * self.count(service)
        ranks = range(first, first + self.count(service))
        return tuple(Participant(service=service, rank=rank) for rank in ranks)

    def partner(self, reader: Participant, service: Service) -> Participant:
        """The rank of a service whose leases and events a process reads."""
        if service not in self.ranks:
            return Participant(service=service)
        replica, rank = divmod(reader.rank, self.count(reader.service))
        number = rank * self.count(service) // self.count(reader.service)
        return self.all(service, replica=replica)[number]

    def readers(self, of: Participant, service: Service) -> tuple[Participant, ...]:
        """The ranks of a service that read this process; there may be none."""
        replica = of.rank // self.count(of.service)
        ranks = self.all(service, replica=replica)
        return tuple(one for one in ranks if self.partner(one, of.service) == of)
