"""What it took to have a step's weights where the rollout reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.events.bodies import WeightsRefreshed

if TYPE_CHECKING:
    from common.ids import WeightsVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Refreshed:
    """What it took to have a version here, or in an engine's processes.

    Attributes:
        alias_bytes: read where training wrote them.
        gather_bytes, rebuild_bytes: copied; 0 where the version was here already.
        seconds: of the copies.
    """

    alias_bytes: int
    gather_bytes: int = 0
    rebuild_bytes: int = 0
    seconds: float = 0.0

    def event(self, version: WeightsVersion) -> WeightsRefreshed:
        """What the node is told."""
        return WeightsRefreshed(
            weights_version=version,
            alias_bytes=self.alias_bytes,
            gather_bytes=self.gather_bytes,
            rebuild_bytes=self.rebuild_bytes,
            seconds=self.seconds,
        )
