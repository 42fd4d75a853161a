"""The phases of a run inside the controller, and the table of legal moves between them."""

from __future__ import annotations

from enum import StrEnum

from common.actor.machine import TransitionTable
from services.controller.record import RunState


class Phase(StrEnum):
    """Where a run is. At most one piece of work is under way in each phase."""

    PENDING = "pending"
    """In the queue behind another run."""
    GATHERING = "gathering"
    """Waits until every service is registered and SERVING."""
    FENCING = "fencing"
    """Takes the epoch that fences out whatever was before."""
    CONFIGURING = "configuring"
    """The broker opens the run and every worker loads its part."""
    ADOPTING = "adopting"
    """Commits steps whose update was durable before their record was."""
    PLANNING = "planning"
    """Takes the epoch of the next step or evaluation."""
    BEGINNING = "beginning"
    """The plan is on its way to the broker."""
    STEPPING = "stepping"
    """The workers are at it; the node's events say how far."""
    COMMITTING = "committing"
    """The step's record is on its way to the disk."""
    CHECKPOINTING = "checkpointing"
    """The learner writes a checkpoint."""
    PAUSED = "paused"
    """Between two steps, until a client resumes or stops the run."""
    ABORTING = "aborting"
    """The failed epoch is being ended."""
    ENDING = "ending"
    """Workers and broker give the run up."""
    SUCCEEDED = "succeeded"
    """Over: every step is committed."""
    FAILED = "failed"
    """Over: given up."""
    STOPPED = "stopped"
    """Over: a client ended it."""


STATE_OF: dict[Phase, RunState] = {
    Phase.PENDING: RunState.PENDING,
    Phase.GATHERING: RunState.CONFIGURING,
    Phase.FENCING: RunState.CONFIGURING,
    Phase.CONFIGURING: RunState.CONFIGURING,
    Phase.ADOPTING: RunState.CONFIGURING,
    Phase.PLANNING: RunState.RUNNING,
    Phase.BEGINNING: RunState.RUNNING,
    Phase.STEPPING: RunState.RUNNING,
    Phase.COMMITTING: RunState.RUNNING,
    Phase.CHECKPOINTING: RunState.RUNNING,
    Phase.PAUSED: RunState.PAUSED,
    Phase.ABORTING: RunState.CONFIGURING,
    Phase.SUCCEEDED: RunState.SUCCEEDED,
    Phase.FAILED: RunState.FAILED,
    Phase.STOPPED: RunState.STOPPED,
}
"""What clients are told; in `ENDING` what they were told before."""

ENDED = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.STOPPED})
"""Phases that nothing leaves."""

ON_DISK_FIRST = frozenset({Phase.COMMITTING, Phase.ADOPTING})
"""Phases whose work is never cut off: what happens meanwhile is dealt with after it."""

_NEXT = "what comes next: stop, checkpoint, pause, evaluation, step or end"
_LOST = "a death, a failed task, a lost broker or a deadline"

TABLE: TransitionTable[Phase] = TransitionTable(
    "run",
    {
        (Phase.PENDING, Phase.GATHERING): "its turn has come",
        (Phase.GATHERING, Phase.FENCING): "every service is SERVING",
        (Phase.FENCING, Phase.CONFIGURING): "the epoch is on disk",
        (Phase.CONFIGURING, Phase.ADOPTING): "the learner is ahead of the journal",
        **{
            (start, finish): _NEXT
            for start in (
                Phase.CONFIGURING,
                Phase.ADOPTING,
                Phase.COMMITTING,
                Phase.CHECKPOINTING,
                Phase.PAUSED,
            )
            for finish in (Phase.CHECKPOINTING, Phase.PAUSED, Phase.PLANNING)
            if start is not finish
        },
        (Phase.CHECKPOINTING, Phase.CHECKPOINTING): "a client wants another checkpoint",
        (Phase.PLANNING, Phase.BEGINNING): "the epoch is on disk",
        (Phase.BEGINNING, Phase.STEPPING): "the broker has published StepBegan",
        (Phase.STEPPING, Phase.COMMITTING): "the step needs nothing more",
        (Phase.BEGINNING, Phase.ABORTING): _LOST,
        (Phase.STEPPING, Phase.ABORTING): _LOST,
        (Phase.ABORTING, Phase.GATHERING): "the epoch is ended, or the broker is away",
        **{
            (start, Phase.GATHERING): _LOST
            for start in (
                Phase.CONFIGURING,
                Phase.ADOPTING,
                Phase.PLANNING,
                Phase.COMMITTING,
                Phase.CHECKPOINTING,
                Phase.PAUSED,
            )
        },
        **{
            (start, Phase.ENDING): "stopped by a client, given up, or done"
            for start in Phase
            if start not in ENDED and start is not Phase.ENDING
        },
        (Phase.ENDING, Phase.SUCCEEDED): "done",
        (Phase.ENDING, Phase.FAILED): "given up",
        (Phase.ENDING, Phase.STOPPED): "stopped by a client",
    },
)
