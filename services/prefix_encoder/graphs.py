"""Which policy prefixes keep their graph until their backward: by measured memory.

A prefix without its graph runs forward again in its backward, which is the same function, so the
choice changes times and never results.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.worker.device_memory import DeviceMemory

log = logging.getLogger(__name__)

T = TypeVar("T")
Limit = int | Literal["auto", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded(Generic[T]):
    """A prefix that has run forward.

    Attributes:
        graph_bytes: of the graph that it has; 0: not measured; None: it has no graph.
    """

    value: T
    graph_bytes: int | None


class PrefixGraphs:
    """Decides for one prefix after the other. `forward` is for the compute thread."""

    def __init__(
        self,
        limit: Limit,
        *,
        reserve_bytes: int,
        memory: Callable[[], DeviceMemory | None],
        give_back: Callable[[], None],
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        """Begin with nothing measured.

        Args:
            limit: most graphs at a time; `auto`: what there is memory for.
            reserve_bytes: of the device, left for others by `auto`.
            memory: what the device has now; None: it is not measured, and everything fits.
            give_back: returns what the process has cached to the device.
            agree: whether all ranks of the service say so, for they run forward again together;
                blocks until all have asked. None: there is one.
        """
        self._limit = limit
        self._reserve_bytes = reserve_bytes
        self._memory = memory
        self._give_back = give_back
        self._agree = agree
        self._bytes_per_token = 0.0
        """Of the longest prefix that was measured, the newest of those."""
        self._longest = 0
        self._most: int | None = None

    def begin_step(self) -> None:
        """What did not fit in the step before may fit in this one."""
        self._most = None

    def may_keep(self, tokens: int, *, kept: int) -> bool:
        """Whether a prefix of so many tokens is to keep its graph.

        Args: kept: how many graphs there are.
        """
        if self._most is not None and kept >= self._most:
            return False
        if self._limit == "all":
            return True
        if self._limit != "auto":
            return kept < self._limit
        memory = self._memory()
        if memory is None or kept == 0:
            return True
        if not self._bytes_per_token:
            return False
        return self.bytes_of(tokens) + self._reserve_bytes <= memory.room

    def forward(self, run: Callable[[bool], T], tokens: int, *, kept: int) -> Encoded[T]:
        """Run a prefix forward, with its graph if that may be kept and fits.

        Args:
            run: the forward, with its graph or without.
            kept: how many graphs there are.
        Raises: torch.OutOfMemoryError, of several ranks, if the graph does not fit: the others are
            in the middle of it.
        """
        keeps = self.may_keep(tokens, kept=kept)
        if keeps if self._agree is None else self._agree(keeps):
            before = self._memory()
            cause = ""
            try:
                value = run(True)
            except torch.OutOfMemoryError as error:
                if self._agree is not None:
                    raise
                cause = str(error)
            else:
                return Encoded(value=value, graph_bytes=self._measured(before, tokens))
            # Only here are the frames gone that held the part of the graph that there was.
            self._refused(cause, tokens, kept=kept)
        return Encoded(value=run(False), graph_bytes=None)

    def bytes_of(self, tokens: int) -> int:
        """What the graph of so many tokens takes; 0: not measured yet."""
        return int(self._bytes_per_token * tokens)

    def _measured(self, before: DeviceMemory | None, tokens: int) -> int:
        after = self._memory()
        if before is None or after is None:
            return 0
        graph_bytes = max(0, after.allocated - before.allocated)
        # What a first forward allocates for good would be much of a short prefix.
        if tokens >= self._longest:
            self._longest = tokens
            self._bytes_per_token = graph_bytes / max(tokens, 1)
        return graph_bytes

    def _refused(self, cause: str, tokens: int, *, kept: int) -> None:
        if self._most is None:
            log.warning(
                "no memory for a prefix graph: it runs again in its backward",
                extra={"tokens": tokens, "graphs": kept, "cause": cause},
            )
        self._most = kept
        self._give_back()
