"""Every Redis key, its value and how long it lives.

| key | Redis type | value | lives |
| --- | --- | --- | --- |
| `rollplex:<name>:service:<participant>` | string | JSON `ServiceEntry` | until its TTL |
| `rollplex:<name>:service-epoch:<participant>` | integer | registrations so far | for ever |
| `rollplex:<name>:runs` | sorted set | run id, scored by creation in ms | for ever |
| `rollplex:<name>:request:<request id>` | string | run id made for that request | 7 days |
| `rollplex:<name>:run:{<run>}:record` | hash | epoch, state, creation, JSON fields | for ever |
| `rollplex:<name>:run:{<run>}:durable` | hash | kind to JSON `DurableRecord` | for ever |
| `rollplex:<name>:run:{<run>}:journal` | stream | kind, epoch, JSON body | last 1,000,000 |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.ids import Participant, RunId

REQUEST_TTL_S = 7 * 24 * 3600
JOURNAL_LIMIT = 1_000_000
"""Entries that a run's journal keeps; the oldest go first."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of one deployment."""

    deployment: str

    @property
    def prefix(self) -> str:
        """What every key of this deployment begins with."""
        return f"rollplex:{self.deployment}"

    @property
    def runs(self) -> str:
        """Ids of all runs by creation."""
        return f"{self.prefix}:runs"

    @property
    def services_pattern(self) -> str:
        """Glob over the registrations."""
        return f"{self.prefix}:service:*"

    def service(self, participant: Participant) -> str:
        """Registration of a living process."""
        return f"{self.prefix}:service:{participant}"

    def service_epoch(self, participant: Participant) -> str:
        """Counter that fences out an older process of the same participant."""
        return f"{self.prefix}:service-epoch:{participant}"

    def request(self, request_id: str) -> str:
        """Which run a creation request made."""
        return f"{self.prefix}:request:{request_id}"

    def record(self, run: RunId) -> str:
        """State of a run."""
        return f"{self.prefix}:run:{{{run}}}:record"

    def durable(self, run: RunId) -> str:
        """Where the durable weights of a run are."""
        return f"{self.prefix}:run:{{{run}}}:durable"

    def journal(self, run: RunId) -> str:
        """What happened in a run, in order."""
        return f"{self.prefix}:run:{{{run}}}:journal"
