"""Reading the services' log files."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_POLL_S = 0.2


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a file; empty: there is no such file yet."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=lines)]
    except FileNotFoundError:
        return []


def follow(paths: Sequence[Path], lines: int) -> Iterator[str]:
    """The last lines of each file, then whatever is added to any, for ever.

    A file that is rotated away or shortened is read on from the beginning of the new one.
    """
    readers = [_Reader(path) for path in paths]
    for reader in readers:
        yield from reader.last(lines)
    while True:
        idle = True
        for reader in readers:
            for line in reader.added():
                idle = False
                yield line
        if idle:
            time.sleep(_POLL_S)


class _Reader:
    """Where reading of one file has got to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0
        self._rest = b""

    def last(self, lines: int) -> list[str]:
        return self.added()[-lines:] if lines > 0 else self.added()[:0]

    def added(self) -> list[str]:
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset, self._rest = status.st_ino, 0, b""
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", errors="replace") for line in whole]
