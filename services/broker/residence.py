"""Where the contents of a storage are: on its device, in the host's memory, or on the way."""

from __future__ import annotations

from enum import StrEnum

from common.actor.machine import TransitionTable


class Residence(StrEnum):
    """Where the contents are. Holds are granted, and openers served, while RESIDENT only."""

    RESIDENT = "resident"
    """In memory of the storage's device; participants have it mapped."""
    SPILLING = "spilling"
    """Being copied to the host's memory. Nobody has it mapped."""
    SPILLED = "spilled"
    """In the host's memory; the device's is free."""
    RESTORING = "restoring"
    """Being copied back into new memory of the device."""


TRANSITIONS = TransitionTable(
    "storage's contents",
    {
        (Residence.RESIDENT, Residence.SPILLING): ("nobody that lives has it mapped or wants it"),
        (Residence.SPILLING, Residence.SPILLED): (
            "the copy is whole, and the device's memory is given back"
        ),
        (Residence.SPILLING, Residence.RESIDENT): "the system has no memory for the copy",
        (Residence.SPILLED, Residence.RESTORING): "it is wanted, and the budget has room",
        (Residence.RESTORING, Residence.RESIDENT): "the contents are back",
        (Residence.RESTORING, Residence.SPILLED): "the device has no memory for it now",
    },
)
