"""The order of a node's events: sequence numbers, repeated events, and what is kept.

Kept are the events of the step that runs and of the one before it. The second is there for a
subscriber that was away at the very moment one step gave way to the next; whoever joins anew
begins with the step that runs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from common.bus.errors import SequenceGap
from common.events import event_to_proto
from common.events.bodies import StepBegan
from protos.rollplex.v1 import events_pb2

if TYPE_CHECKING:
    from common.events import Event

KEPT_LIMIT = 200_000
"""Most events kept. A step has some ten a group; past this the oldest go, and whoever still
needed them gets `SequenceGap`, never silence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvent:
    """A sequenced event, and the `HubReply` that delivers it, made once for all subscribers."""

    event: Event
    delivery: bytes


class EventLog:
    """Sequence numbers from 1; no IO."""

    def __init__(self, *, kept_limit: int = KEPT_LIMIT) -> None:
        self._kept: deque[LoggedEvent] = deque()
        self._by_id: dict[str, LoggedEvent] = {}
        self._kept_limit = kept_limit
        self._head_seq = 0
        self._step_seq = 1

    @property
    def head_seq(self) -> int:
        """Number of the newest event; 0: none yet."""
        return self._head_seq

    @property
    def first_seq(self) -> int:
        """Number of the oldest event that is kept; of the next one, if none is."""
        return self._head_seq - len(self._kept) + 1

    @property
    def step_seq(self) -> int:
        """Where a subscriber without history begins: the newest StepBegan, or the start."""
        return max(self._step_seq, self.first_seq)

    def find(self, event_id: str) -> LoggedEvent | None:
        """The kept event of that id."""
        return self._by_id.get(event_id)

    def append(self, event: Event) -> LoggedEvent:
        """Give the event the next number. The id must not be kept already."""
        assert event.event_id not in self._by_id, event.event_id
        self._head_seq += 1
        sequenced = replace(event, seq=self._head_seq)
        reply = events_pb2.HubReply(deliver=event_to_proto(sequenced))
        logged = LoggedEvent(event=sequenced, delivery=reply.SerializeToString())
        if isinstance(event.body, StepBegan):
            self._drop_before(self._step_seq)
            self._step_seq = self._head_seq
        self._kept.append(logged)
        self._by_id[event.event_id] = logged
        if len(self._kept) > self._kept_limit:
            self._drop_oldest()
        return logged

    def after(self, seq: int) -> list[LoggedEvent]:
        """Every event after that number.

        Raises:
            SequenceGap: the next one is not kept any more, or the number was never given.
        """
        if not self.first_seq - 1 <= seq <= self._head_seq:
            raise SequenceGap(
                f"the event after {seq} is not to be had: kept are {self.first_seq} to "
                f"{self._head_seq}",
                after_seq=seq,
                first_seq=self.first_seq,
                head_seq=self._head_seq,
            )
        return list(islice(self._kept, seq + 1 - self.first_seq, None))

    def _drop_before(self, seq: int) -> None:
        # Runs while the newest number is given but its event not yet kept.
        while self._kept and self._kept[0].event.seq < seq:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        del self._by_id[self._kept.popleft().event.event_id]
