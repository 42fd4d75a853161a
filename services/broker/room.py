"""Room in one arena: how much is used, and who waits for some.

Invariants: `used_bytes` is the sum of what was taken and not given back; what waits does not fit,
or comes after something of the same participant that does not.
What processes hold themselves is counted beside it. It keeps requests waiting, but never has one
refused that waits: it may shrink at any time.
Requests of one participant are granted in order. Those of different participants are granted in
order of arrival as far as they fit: a request that does not fit must not keep back the one whose
result would make the room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.tensors.errors import ArenaFull

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.errors import RollplexError
    from common.ids import Epoch, Participant, RunId
    from services.broker.events import Origin


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoomRequest:
    """Something that wants room. Ends in exactly one of `grant` and `refuse`, or is dropped."""

    origin: Origin
    run_id: RunId
    epoch: Epoch | None
    """None: run-scoped."""
    what: str
    """For messages, such as ``lease policy.prefix_kv``."""
    size_bytes: int
    deadline_ns: int
    grant: Callable[[], None]
    """The room is taken already when it is called."""
    refuse: Callable[[RollplexError], None]


class Room:
    """See the module's text."""

    def __init__(
        self,
        *,
        device: str,
        capacity_bytes: int,
        page_bytes: int,
        table: Callable[[], str],
        limit_bytes: int | None = None,
    ) -> None:
        """Args: limit_bytes: for used and held together; None: held memory keeps nothing back."""
        self.device = device
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.held_bytes = 0
        self.peak_bytes = 0
        self.peak_total_bytes = 0
        self.run_scoped_bytes = 0
        self.spillable_bytes = 0
        """Of those, what may leave without its run's end, so that waiting can help."""
        self.waiting: list[RoomRequest] = []
        self._limit_bytes = limit_bytes
        self._page_bytes = page_bytes
        self._table = table

    def rounded(self, size_bytes: int) -> int:
        """What an allocation of a size really takes: whole pages, at least one."""
        pages = max(1, -(-size_bytes // self._page_bytes))
        return pages * self._page_bytes

    def request(self, request: RoomRequest, *, wait: bool) -> None:
        """Grant now, queue, or refuse."""
        self.waiting.append(request)
        self.pump()
        if not wait and request in self.waiting:
            self.waiting.remove(request)
            request.refuse(self._full(request, "there is no room now, and waiting was not wanted"))

    def fits(self, size_bytes: int) -> bool:
        """Whether there is room now."""
        return size_bytes <= self.free_bytes

    @property
    def free_bytes(self) -> int:
        """What could be taken now."""
        free_bytes = self.capacity_bytes - self.used_bytes
        if self._limit_bytes is not None:
            free_bytes = min(free_bytes, self._limit_bytes - self.used_bytes - self.held_bytes)
        return max(0, free_bytes)

    @property
    def left_bytes(self) -> int:
        """What could be taken beside everything that waits."""
        return max(0, self.free_bytes - sum(request.size_bytes for request in self.waiting))

    @property
    def lease_bytes(self) -> int:
        """What leases may come to. Held memory counts as returned: much of it is cached."""
        return self.capacity_bytes - self.run_scoped_bytes

    @property
    def kept_back_bytes(self) -> int:
        """Size of the first request that waits for nothing but held memory; 0: there is none."""
        budget_bytes = self.capacity_bytes - self.used_bytes
        for request in self.waiting:
            if self.free_bytes < request.size_bytes <= budget_bytes:
                return request.size_bytes
        return 0

    def hold(self, more_bytes: int) -> None:
        """Processes hold more, or less, than before."""
        self.held_bytes += more_bytes
        self._note_peaks()

    def take_now(self, what: str, size_bytes: int) -> None:
        """Take run-scoped room at once. Raises ArenaFull."""
        if not self.fits(size_bytes):
            raise ArenaFull(
                f"{what} wants {size_bytes} bytes, {self.free_bytes} of {self.device} are free\n"
                f"{self._table()}"
            )
        self._take(size_bytes, run_scoped=True)

    def give_back(self, size_bytes: int, *, run_scoped: bool) -> None:
        """Return room that was taken."""
        self.used_bytes -= size_bytes
        if run_scoped:
            self.run_scoped_bytes -= size_bytes

    def pump(self) -> None:
        """Grant what fits and refuse what never will, until nothing changes."""
        while self._pump_once():
            pass

    def expire(self, now_ns: int) -> list[RoomRequest]:
        """Remove and return the requests whose deadline has passed."""
        return self._remove(lambda request: request.deadline_ns <= now_ns)

    def remove_of(self, participant: Participant) -> list[RoomRequest]:
        """Remove and return a participant's requests."""
        return self._remove(lambda request: request.origin.participant == participant)

    def remove_origin(self, origin: Origin) -> list[RoomRequest]:
        """Remove and return the request of one origin."""
        return self._remove(lambda request: request.origin == origin)

    def remove_stale(
        self, run_id: RunId, ended: Callable[[Epoch | None], bool]
    ) -> list[RoomRequest]:
        """Remove and return the requests of a run whose epoch has ended."""
        return self._remove(lambda request: request.run_id == run_id and ended(request.epoch))

    def _remove(self, match: Callable[[RoomRequest], bool]) -> list[RoomRequest]:
        removed = [request for request in self.waiting if match(request)]
        self.waiting = [request for request in self.waiting if request not in removed]
        return removed

    def _pump_once(self) -> bool:
        behind: set[Participant] = set()
        for request in self.waiting:
            if request.size_bytes > self._lasting_room_bytes:
                self.waiting.remove(request)
                request.refuse(self._full(request, "waiting cannot help"))
                return True
            participant = request.origin.participant
            if self.fits(request.size_bytes) and participant not in behind:
                self.waiting.remove(request)
                self._take(request.size_bytes, run_scoped=request.epoch is None)
                request.grant()
                return True
            behind.add(participant)
        return False

    def _take(self, size_bytes: int, *, run_scoped: bool) -> None:
        self.used_bytes += size_bytes
        self._note_peaks()
        if run_scoped:
            self.run_scoped_bytes += size_bytes

    def _note_peaks(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self.peak_total_bytes = max(self.peak_total_bytes, self.used_bytes + self.held_bytes)

    @property
    def _lasting_room_bytes(self) -> int:
        """What could be free at some time of the run."""
        return self.capacity_bytes - self.run_scoped_bytes + self.spillable_bytes

    def _full(self, request: RoomRequest, why: str) -> ArenaFull:
        return ArenaFull(
            f"{request.what} of {request.origin.participant} wants {request.size_bytes} bytes: "
            f"{why}; of {self.device}, {self.free_bytes} bytes are free and "
            f"{self._lasting_room_bytes} are not taken for the whole run\n{self._table()}",
            size_bytes=request.size_bytes,
        )
