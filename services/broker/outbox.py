"""Where the parts of the broker's state put their instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.broker.events import Generation

if TYPE_CHECKING:
    from services.broker.instructions import Instruction


class Outbox:
    """The instructions of the event being handled, and the source of generation numbers."""

    def __init__(self, *, first_generation: int) -> None:
        self._instructions: list[Instruction] = []
        self._next_generation = first_generation

    def add(self, instruction: Instruction) -> None:
        """Append; instructions are carried out in order."""
        self._instructions.append(instruction)

    def next_generation(self) -> Generation:
        """A number that no memory has had."""
        self._next_generation += 1
        return Generation(self._next_generation - 1)

    def take(self) -> list[Instruction]:
        """Hand over everything, and be empty."""
        taken, self._instructions = self._instructions, []
        return taken
