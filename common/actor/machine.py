"""What every state machine shares: a table of legal moves, and the story in the error."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

from common.errors import RollplexError

if TYPE_CHECKING:
    from collections.abc import Mapping

State = TypeVar("State", bound=Enum)


class InvalidTransition(RollplexError):
    """A move that the table does not have: a broken invariant of the machine.

    Attributes:
        key: whose state it is.
        start: the state it was in.
        finish: the state asked for.
        story: what happened to it so far, oldest first.
    """

    def __init__(
        self, *, machine: str, key: object, start: Enum, finish: Enum, story: tuple[str, ...]
    ) -> None:
        past = "; ".join(story) or "nothing happened to it yet"
        super().__init__(
            f"{machine} {key}: no transition {start.name} -> {finish.name}. Story: {past}",
            machine=machine,
            key=str(key),
            start=start.name,
            finish=finish.name,
        )
        self.key = key
        self.start = start
        self.finish = finish
        self.story = story


class Story:
    """The last things that happened to one item, bounded."""

    def __init__(self, limit: int = 32) -> None:
        self._lines: deque[str] = deque(maxlen=limit)

    def add(self, line: str) -> None:
        """Remember one thing; the oldest is forgotten when there are too many."""
        self._lines.append(line)

    def lines(self) -> tuple[str, ...]:
        """Oldest first."""
        return tuple(self._lines)


class TransitionTable(Generic[State]):
    """The legal moves of one kind of item, each with the event that makes it."""

    def __init__(self, machine: str, moves: Mapping[tuple[State, State], str]) -> None:
        """Args: machine: what the items are, for errors. moves: (start, finish) to its cause."""
        self.machine = machine
        self.moves = dict(moves)

    def check(self, key: object, start: State, finish: State, story: Story) -> None:
        """Raises InvalidTransition unless the table has the move."""
        if (start, finish) not in self.moves:
            raise InvalidTransition(
                machine=self.machine, key=key, start=start, finish=finish, story=story.lines()
            )

    def markdown(self) -> str:
        """The table as a page shows it, in the order in which it was written."""
        rows = [
            f"| {start.name} | {finish.name} | {cause} |"
            for (start, finish), cause in self.moves.items()
        ]
        return "\n".join(["| from | to | because |", "| --- | --- | --- |", *rows])


class StateCell(Generic[State]):
    """The state of one item; the only way to change it is a move that the table has."""

    def __init__(
        self, table: TransitionTable[State], key: object, initial: State, *, limit: int = 32
    ) -> None:
        self._table = table
        self._key = key
        self._state = initial
        self.story = Story(limit)

    @property
    def state(self) -> State:
        """The state it is in."""
        return self._state

    def move(self, finish: State, cause: str) -> None:
        """Go to `finish`. Raises InvalidTransition with the story."""
        self._table.check(self._key, self._state, finish, self.story)
        self.story.add(f"{self._state.name} -> {finish.name} ({cause})")
        self._state = finish
