"""How many prefixes of a step kept their graph, and what the others cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.events import Event, bodies

if TYPE_CHECKING:
    from common.ids import GroupId


class GraphTally:
    """Of one epoch, folded from its events; each is to be told once."""

    def __init__(self) -> None:
        self._alive: dict[GroupId, int] = {}
        """Bytes of the graphs that there are, by group."""
        self._peak_bytes = 0
        self._kept = 0
        self._recomputed = 0
        self._recompute_s = 0.0

    def apply(self, event: Event) -> None:
        """Fold one event in; most are about something else."""
        group = event.group
        if group is None:
            return
        match event.body:
            case bodies.PrefixEncoded(graph_bytes=int(size_bytes)):
                self._alive[group] = size_bytes
                self._peak_bytes = max(self._peak_bytes, sum(self._alive.values()))
            case bodies.PrefixBackpropagated(recomputed=recomputed, recompute_s=seconds):
                had_graph = self._alive.pop(group, None) is not None
                self._kept += had_graph and not recomputed
                self._recomputed += recomputed
                self._recompute_s += seconds
            case bodies.GroupDropped():
                self._alive.pop(group, None)
            case _:
                pass

    def metrics(self) -> dict[str, float]:
        """`graph_bytes_peak` is 0 where nothing is measured."""
        return {
            "graphs_kept": float(self._kept),
            "prefixes_recomputed": float(self._recomputed),
            "graph_bytes_peak": float(self._peak_bytes),
            "time_prefix_recompute_s": self._recompute_s,
        }
