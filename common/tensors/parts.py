"""A whole of several storages: its parts, which are held one after the other.

A part is named after the whole: `policy.optimizer.0`, `policy.optimizer.1`, with leading zeros
where there are ten or more, so that they sort in order.
"""

from __future__ import annotations

RANK = "/"
"""Before the number of the rank whose storage it is, in the whole's name; rank 0 has none."""
PARTS_IN_FLIGHT = 3
"""Parts of a whole on their device at a time, where its parts are spilled: one leaves, one is held,
one comes. With more room there may be more; room for one alone is enough to go on."""


def part_names(whole: str, count: int) -> tuple[str, ...]:
    """The names of so many parts, in order."""
    digits = len(str(count - 1))
    return tuple(f"{whole}.{number:0{digits}}" for number in range(count))


def whole_of(name: str) -> str:
    """The name of the whole that a storage is a part of; of any other its own name."""
    whole, dot, number = name.rpartition(".")
    return whole if dot and number.isdecimal() else name


def in_flight_bytes(sizes_bytes: list[int]) -> int:
    """What the parts of a whole take of their device at a time, where they are spilled."""
    return min(sum(sizes_bytes), PARTS_IN_FLIGHT * max(sizes_bytes, default=0))
