"""A spillable storage's memory in this process: mapped, or parked at an address that stays."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Parkable(Protocol):
    """Shared memory at a fixed address."""

    def park(self) -> None:
        """Take the memory out and keep the address. Idempotent."""

    def restore(self, descriptor: int) -> None:
        """Map other memory there; the descriptor stays the caller's."""


class Parking:
    """Whether the memory is there, and how many need it to be. Any thread.

    Invariant: memory is parked only when nobody holds the storage or has asked to. A hold that is
    asked for meanwhile is answered with memory, which `bring_back` maps after the parking.

    Attributes:
        life: which of the storage's lives the mapped memory is of; memory of an older one has
            nobody's contents.
        parked: whether no memory is mapped.

    A hold in passing changes nothing for those who use the storage: `park_again` parks behind it
    what was parked before, or would have been meanwhile.
    """

    def __init__(self, memory: Parkable) -> None:
        self.life = 0
        self.parked = False
        self._memory = memory
        self._users = 0
        self._passing = 0
        self._given_up = False
        """Whether the last of the others who had to do with it has parked it."""
        self._counting = threading.Lock()
        self._mapping = threading.Lock()

    def enter(self, *, passing: bool = False) -> None:
        """A hold is about to be asked for."""
        with self._counting:
            self._users += 1
            self._passing += passing
            self._given_up = self._given_up and passing

    def leave(self, *, passing: bool = False) -> None:
        """A hold has ended, or is not wanted any more."""
        with self._counting:
            self._users -= 1
            self._passing -= passing

    def expect(self) -> None:
        """A hold will be asked for soon."""
        with self._counting:
            self._given_up = False

    def park_again(self, tell: Callable[[], None]) -> None:
        """After a hold in passing."""
        with self._counting:
            given_up = self._given_up
        if given_up:
            self.park(tell)

    def park(self, tell: Callable[[], None]) -> bool:
        """Take the memory out, then tell the broker. Returns whether it is out.

        The broker is told even if it is out already: it may have been asked to call it back since.
        """
        with self._mapping:
            with self._counting:
                self._given_up = self._users == self._passing
                if self._users:
                    return False
            if not self.parked:
                self._memory.park()
                self.parked = True
            tell()
            return True

    def bring_back(self, life: int, descriptor: int) -> None:
        """Map the memory of a life, unless it is mapped. The descriptor stays the caller's."""
        with self._mapping:
            if self.parked or life != self.life:
                self._memory.park()
                self.parked = True
                self._memory.restore(descriptor)
                self.parked, self.life = False, life
