"""The memory broker's ledger: who holds how many bytes of a node until when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.tensors.parts import whole_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protos.rollplex.v1 import broker_pb2 as pb

COPIES = "copies"
"""Device of what lies in the host's memory while it is away from its own device."""
HELD = "held"
"""State of what a process's own allocator or CUDA context has of a device."""
FREE = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One lease, storage or reservation, or what one process holds itself.

    Attributes:
        name: tensor class or storage, such as `policy.prefix_kv` or `policy.optimizer.0`; of what
            a process holds, `allocator` or `context`.
        run_id: None: of no run.
        waiting_for: consumers that have not released yet.
        until: in words, what ends it.
        device: arena that it is counted in: `cpu`, a GPU's UUID, or `copies`.
    """

    name: str
    run_id: str | None
    group: int | None
    size_bytes: int
    producer: str
    waiting_for: tuple[str, ...]
    holders: tuple[str, ...]
    state: str
    residency: str
    until: str
    device: str

    @property
    def held(self) -> bool:
        """Whether it is a process's own memory, beside what the broker handed out."""
        return self.state == HELD

    @property
    def series(self) -> str:
        """What it is counted under in a picture: its class, and of which process if it is held."""
        return f"{self.producer} {self.name}" if self.held else self.class_name

    @property
    def class_name(self) -> str:
        """Its tensor class: of a part of a whole, such as `policy.optimizer.0`, the whole's."""
        return whole_of(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerArena:
    """One source of memory.

    Attributes:
        capacity_bytes: the budget, for what the broker hands out.
        used_bytes: handed out or reserved.
        held_bytes: by processes' own allocators and contexts.
        free_bytes: what could be handed out now.
        peak_bytes: of `used_bytes`.
        peak_total_bytes: of used and held together.
    """

    device: str
    capacity_bytes: int
    used_bytes: int
    held_bytes: int
    free_bytes: int
    peak_bytes: int
    peak_total_bytes: int

    @property
    def total_bytes(self) -> int:
        """Used and held: the sum of the arena's entries."""
        return self.used_bytes + self.held_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The whole ledger of one node at one moment.

    Attributes:
        device: of the arena that the workers compute in.
        arenas: the host's first.
    """

    device: str
    arenas: tuple[LedgerArena, ...]
    entries: tuple[LedgerEntry, ...]

    def arena(self, device: str | None = None) -> LedgerArena:
        """The totals of one device; None: of that which the workers compute in."""
        wanted = device or self.device
        return next(arena for arena in self.arenas if arena.device == wanted)

    def by_series(self, device: str | None = None) -> dict[str, int]:
        """Bytes by tensor class, and by process and kind; they add up to the arena's total."""
        wanted = device or self.device
        sizes: dict[str, int] = {}
        for entry in self.entries:
            if entry.device == wanted:
                sizes[entry.series] = sizes.get(entry.series, 0) + entry.size_bytes
        return sizes

    def groups(self) -> list[EntryGroup]:
        """Entries of one class in one state together, largest first within each device."""
        found: dict[tuple[str, ...], list[LedgerEntry]] = {}
        for entry in self.entries:
            key = (entry.device, entry.class_name, entry.state, entry.residency, *_owner(entry))
            found.setdefault(key, []).append(entry)
        order = {arena.device: index for index, arena in enumerate(self.arenas)}
        groups = [EntryGroup(entries=tuple(entries)) for entries in found.values()]
        return sorted(
            groups,
            key=lambda g: (order.get(g.first.device, len(order)), g.first.held, -g.size_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryGroup:
    """Entries of one class, device, state and residency; at least one."""

    entries: tuple[LedgerEntry, ...]

    @property
    def first(self) -> LedgerEntry:
        """What all of them agree on is this one's."""
        return self.entries[0]

    @property
    def size_bytes(self) -> int:
        """Of all of them."""
        return sum(entry.size_bytes for entry in self.entries)

    @property
    def holders(self) -> list[str]:
        """Who holds one of them, by name."""
        return sorted({holder for entry in self.entries for holder in entry.holders})

    @property
    def until(self) -> list[str]:
        """What ends them, each once."""
        return list(dict.fromkeys(entry.until for entry in self.entries))


def ledger_from_proto(message: pb.Ledger) -> Ledger:
    """The ledger as the broker tells it."""
    return Ledger(
        device=message.device,
        arenas=tuple(
            LedgerArena(
                device=arena.device,
                capacity_bytes=arena.capacity_bytes,
                used_bytes=arena.used_bytes,
                held_bytes=arena.held_bytes,
                free_bytes=arena.free_bytes,
                peak_bytes=arena.peak_bytes,
                peak_total_bytes=arena.peak_total_bytes,
            )
            for arena in message.arenas
        ),
        entries=tuple(_entries(message.entries)),
    )


def _entries(messages: Iterable[pb.LedgerEntry]) -> Iterable[LedgerEntry]:
    for entry in messages:
        yield LedgerEntry(
            name=entry.name,
            run_id=entry.run_id or None,
            group=entry.group if entry.HasField("group") else None,
            size_bytes=entry.bytes,
            producer=entry.producer,
            waiting_for=tuple(entry.waiting_for),
            holders=tuple(entry.holders),
            state=entry.state,
            residency=entry.residency,
            until=entry.until,
            device=entry.device,
        )


def _owner(entry: LedgerEntry) -> tuple[str, ...]:
    return (entry.producer,) if entry.held else ()
