"""Runs of this node and their epoch fences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import Stale
from common.ids import StepIndex
from common.tensors.errors import StaleLease, UnknownRun

if TYPE_CHECKING:
    from common.ids import Epoch, RunId
    from common.step.plan import StepPlan


_NO_STEP = StepIndex(0)


@dataclass(slots=True)
class Fence:
    """The newest epoch of one run. Everything of an older one is refused."""

    run_id: RunId
    epoch: Epoch
    step: StepIndex = _NO_STEP
    begun: bool = False
    """Whether the epoch's step has begun."""
    ended: str | None = None
    """Why the epoch ended without an update; None: it did not."""


class Runs:
    """The open runs. Only this class moves a fence."""

    def __init__(self) -> None:
        self._fences: dict[RunId, Fence] = {}

    @property
    def open(self) -> list[Fence]:
        """All open runs, oldest first."""
        return list(self._fences.values())

    def fence(self, run_id: RunId) -> Fence:
        """Raises UnknownRun."""
        if run_id not in self._fences:
            known = ", ".join(self._fences) or "none"
            raise UnknownRun(
                f"run {run_id!r} is not open on this node; open runs: {known}", run_id=run_id
            )
        return self._fences[run_id]

    def knows(self, run_id: RunId) -> bool:
        """Whether a run is open."""
        return run_id in self._fences

    def require_known(self, run_id: RunId) -> None:
        """Raises UnknownRun."""
        self.fence(run_id)

    def require_current(self, run_id: RunId, epoch: Epoch) -> None:
        """Let through only what belongs to the epoch under way. Raises UnknownRun, StaleLease."""
        reason = self.why_ended(run_id, epoch)
        if reason is not None:
            raise StaleLease(reason, run_id=run_id, epoch=epoch)
        fence = self.fence(run_id)
        if epoch > fence.epoch or not fence.begun:
            raise StaleLease(
                f"epoch {epoch} of run {run_id} has not begun here; the newest is {fence.epoch}",
                run_id=run_id,
                epoch=epoch,
            )

    def why_ended(self, run_id: RunId, epoch: Epoch) -> str | None:
        """Why an epoch is over, in words; None: it is not. Raises UnknownRun."""
        fence = self.fence(run_id)
        if epoch < fence.epoch:
            return f"epoch {epoch} of run {run_id} ended when epoch {fence.epoch} was opened"
        if epoch == fence.epoch and fence.ended is not None:
            return f"epoch {epoch} of run {run_id} was aborted: {fence.ended}"
        return None

    def open_run(self, run_id: RunId, epoch: Epoch) -> bool:
        """Make the run known, or raise its fence. Returns whether older epochs ended by this."""
        fence = self._fences.get(run_id)
        if fence is None:
            self._fences[run_id] = Fence(run_id=run_id, epoch=epoch)
            return False
        if epoch <= fence.epoch:
            return False
        self._fences[run_id] = Fence(run_id=run_id, epoch=epoch)
        return True

    def begin(self, plan: StepPlan) -> bool:
        """Begin an epoch.

        Returns: whether it is new; a repeated order changes nothing.

        Raises:
            UnknownRun: the run is not open.
            Stale: the epoch is over, or another step has it.
        """
        fence = self.fence(plan.run_id)
        reason = self.why_ended(plan.run_id, plan.epoch)
        if reason is not None:
            raise Stale(reason, run_id=plan.run_id, epoch=plan.epoch)
        if plan.epoch == fence.epoch and fence.begun:
            if plan.step != fence.step:
                raise Stale(
                    f"epoch {plan.epoch} of run {plan.run_id} is step {fence.step}, not "
                    f"{plan.step}: every attempt at a step needs an epoch of its own"
                )
            return False
        self._fences[plan.run_id] = Fence(
            run_id=plan.run_id, epoch=plan.epoch, step=plan.step, begun=True
        )
        return True

    def abort(self, run_id: RunId, epoch: Epoch, reason: str) -> bool:
        """End an epoch; it need not have begun. Returns whether this call ended it."""
        fence = self.fence(run_id)
        if self.why_ended(run_id, epoch) is not None:
            return False
        step = fence.step if fence.epoch == epoch else _NO_STEP
        self._fences[run_id] = Fence(
            run_id=run_id, epoch=epoch, step=step, begun=fence.epoch == epoch, ended=reason
        )
        return True

    def close(self, run_id: RunId) -> bool:
        """Forget the run. Returns whether it was known."""
        return self._fences.pop(run_id, None) is not None
