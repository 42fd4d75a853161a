"""Key/value heads of ranks of different degrees. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.layouts.box import Box

if TYPE_CHECKING:
    from common.layouts.rows import Cut, Rows


def nested_heads(kv_heads: int, *, reader: Cut, holder: Cut) -> Rows | None:
    """Which of a holder's heads a reader has.

    Args:
        kv_heads: of the model.
        reader, holder: the ranks, each among those of its own degree.
    Returns: counted from the holder's first one; None: the holder lacks some of the reader's.
    """
    wanted, held = (Box((rank.heads(kv_heads, 1),)) for rank in (reader, holder))
    if not held.contains(wanted):
        return None
    (first, last), (start, _) = wanted.ranges[0], held.ranges[0]
    return first - start, last - start
