"""The rooms of a node: one for the host's memory, one for each GPU, one for spilled contents.

The host's comes first. Without a GPU, `device` placement is the host's memory too. Spilled contents
are in the host's memory, but in no arena: they have a budget of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import InvalidArgument
from common.tensors.spec import Placement
from services.broker.ledger import ArenaTotals
from services.broker.room import Room

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from common.ids import Epoch, Participant, RunId
    from services.broker.events import Origin
    from services.broker.room import RoomRequest


COPIES = "copies"
"""What the ledger calls the room for spilled contents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaSize:
    """What may be handed out of one arena."""

    device: str
    """``cpu``, or a GPU's UUID."""
    capacity_bytes: int
    page_bytes: int
    """Allocations take whole pages."""
    spills: bool = True
    """Whether its storages can be spilled."""
    limit_bytes: int | None = None
    """For what is handed out and what processes hold themselves, together; None: the latter keeps
    nothing back."""
    context_bytes: int = 0
    """The broker's own CUDA context on it."""


class Rooms:
    """See the module's text.

    Args:
        sizes: the host's first; of the others the first is for participants that name no GPU.
        copies_bytes: of the host's memory, for spilled contents; 0: nothing is spilled.
        table: the ledger for refusals.
    """

    def __init__(
        self, sizes: Sequence[ArenaSize], *, copies_bytes: int = 0, table: Callable[[], str]
    ) -> None:
        self.table = table
        self.copies = Room(
            device=COPIES, capacity_bytes=copies_bytes, page_bytes=sizes[0].page_bytes, table=table
        )
        self.promised_bytes = 0
        """Of the room for copies, what the storages that may be spilled come to."""
        self._spilling = {size.device for size in sizes if size.spills}
        self._rooms = {
            size.device: Room(
                device=size.device,
                capacity_bytes=size.capacity_bytes,
                page_bytes=size.page_bytes,
                table=table,
                limit_bytes=size.limit_bytes,
            )
            for size in sizes
        }
        self.context_bytes = {size.device: size.context_bytes for size in sizes}
        self._host = sizes[0].device
        self.default_device = sizes[min(1, len(sizes) - 1)].device
        self._homes: dict[Participant, str] = {}

    def __iter__(self) -> Iterator[Room]:
        return iter((*self._rooms.values(), self.copies))

    def spills(self, device: str, size_bytes: int) -> bool:
        """Whether one more storage of a device can be spilled: there is room for its copy too."""
        free_bytes = self.copies.capacity_bytes - self.promised_bytes
        return device in self._spilling and size_bytes <= free_bytes

    def knows(self, device: str) -> bool:
        """Whether a device has a room."""
        return device in self._rooms

    def of(self, device: str) -> Room:
        """The room of a device that has one."""
        return self._rooms[device]

    def join(self, participant: Participant, device: str) -> None:
        """A participant computes on a GPU; empty: on the node's first, if there is one."""
        self._homes[participant] = device or self.default_device

    def home(self, participant: Participant) -> str:
        """The device that a participant's `device` placement means."""
        return self._homes.get(participant, self.default_device)

    def place(self, participant: Participant, placement: Placement) -> Room:
        """Where an allocation of a participant goes.

        Raises:
            InvalidArgument: it computes on a GPU that this broker has no memory of.
        """
        device = self._host if placement is Placement.HOST else self.home(participant)
        if not self.knows(device):
            raise InvalidArgument(
                f"{participant} computes on {device}, of which this broker has no memory; it has "
                f"{', '.join(self._rooms)}"
            )
        return self._rooms[device]

    def lease_bytes(self) -> dict[str, int]:
        """By device, what leases may come to while run-scoped memory stays as it is."""
        return {device: room.lease_bytes for device, room in self._rooms.items()}

    @property
    def waiting(self) -> list[RoomRequest]:
        """Everything that waits for room."""
        return [request for room in self for request in room.waiting]

    def totals(self) -> tuple[ArenaTotals, ...]:
        """Of each room, the host's first; that of spilled contents once there were any."""
        return tuple(
            ArenaTotals(
                device=room.device,
                capacity_bytes=room.capacity_bytes,
                used_bytes=room.used_bytes,
                peak_bytes=room.peak_bytes,
                held_bytes=room.held_bytes,
                peak_total_bytes=room.peak_total_bytes,
                free_bytes=room.free_bytes,
            )
            for room in self
            if room is not self.copies or room.peak_bytes
        )

    def pump(self) -> None:
        """Grant what fits and refuse what never will."""
        for room in self:
            room.pump()

    def expire(self, now_ns: int) -> list[RoomRequest]:
        """Remove and return the requests whose deadline has passed."""
        return [request for room in self for request in room.expire(now_ns)]

    def remove_of(self, participant: Participant) -> list[RoomRequest]:
        """Remove and return a participant's requests."""
        return [request for room in self for request in room.remove_of(participant)]

    def remove_origin(self, origin: Origin) -> list[RoomRequest]:
        """Remove and return the request of one origin."""
        return [request for room in self for request in room.remove_origin(origin)]

    def remove_stale(
        self, run_id: RunId, ended: Callable[[Epoch | None], bool]
    ) -> list[RoomRequest]:
        """Remove and return the requests of a run whose epoch has ended."""
        return [request for room in self for request in room.remove_stale(run_id, ended)]
