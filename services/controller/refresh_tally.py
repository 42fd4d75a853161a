"""What the rollout's ranks and engines copied to have a step's weights, those that have to."""

from __future__ import annotations

from common.events import Event, bodies


class RefreshTally:
    """Of one epoch, folded from its events, each given once."""

    def __init__(self) -> None:
        self._found: list[bodies.WeightsRefreshed] = []

    def apply(self, event: Event) -> None:
        """Fold one event in; most are about something else."""
        if isinstance(event.body, bodies.WeightsRefreshed):
            self._found.append(event.body)

    def metrics(self) -> dict[str, float]:
        """Bytes of all ranks, and the time of the slowest; nothing where none had to."""
        found = self._found
        if not found:
            return {}
        return {
            "weights_alias_bytes": float(sum(one.alias_bytes for one in found)),
            "weights_gather_bytes": float(sum(one.gather_bytes for one in found)),
            "weights_rebuild_bytes": float(sum(one.rebuild_bytes for one in found)),
            "time_weights_refresh_s": max(one.seconds for one in found),
        }
