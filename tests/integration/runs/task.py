"""Data and rewards of the run tests, the bad ones included."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from rollplex.verify.task import checksum_reward
from rollplex.verify.task import rows as good_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UNREADABLE = 5
TOO_LONG = 6
NO_MESSAGES = 9
BAD_ROWS = frozenset({UNREADABLE, TOO_LONG, NO_MESSAGES})


def text_rows() -> Sequence[Mapping[str, Any]]:
    """Prompts without any picture."""
    return [
        {"messages": [{"role": "user", "content": f"Say {index} words."}], "index": index}
        for index in range(16)
    ]


def wordy_rows() -> Sequence[Mapping[str, Any]]:
    """The usual rows with some 620 tokens each."""
    rows = [dict(row) for row in good_rows()]
    for row in rows:
        (message,) = row["messages"]
        more = {"type": "text", "text": "0123456789" * 60}
        row["messages"] = [{**message, "content": [*message["content"], more]}]
    return rows


def rows_with_bad_ones() -> Sequence[Mapping[str, Any]]:
    """The usual rows; three of the first twelve cannot be used, each for another reason."""
    rows = [dict(row) for row in good_rows()][:12]
    picture = {"type": "image", "image": "/no/such/picture.png"}
    rows[UNREADABLE]["messages"] = [
        {"role": "user", "content": [picture, {"type": "text", "text": "What is shown here?"}]}
    ]
    rows[TOO_LONG]["messages"] = [{"role": "user", "content": "too many words " * 400}]
    del rows[NO_MESSAGES]["messages"]
    return rows


def misbehaving_reward(completion: str, row: Mapping[str, Any]) -> float:
    """Raises, overruns, or gives NaN, for a quarter of the rows each."""
    match int(row["index"]) % 4:
        case 0:
            raise ValueError("this row cannot be rewarded")
        case 1:
            time.sleep(600)
        case 2:
            return math.nan
    return checksum_reward(completion, row)


def overflowing_reward(completion: str, row: Mapping[str, Any]) -> float:
    """No loss in float32 can hold it."""
    return 1e300 * checksum_reward(completion, row)


def raising_reward(completion: str, row: Mapping[str, Any]) -> float:
    """Raises for one row of the data set."""
    if int(row["index"]) == 3:
        raise ValueError("this row cannot be rewarded")
    return checksum_reward(completion, row)


def slow_reward(completion: str, row: Mapping[str, Any]) -> float:
    """Makes a step long enough for a client to act inside it."""
    time.sleep(0.05)
    return checksum_reward(completion, row)
