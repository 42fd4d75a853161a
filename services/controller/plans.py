"""What each step consists of: a pure function of the recipe, the data's length and the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.ids import Epoch, GroupId, RunId, Service, StepIndex, WeightsVersion
from common.step.partners import Partners
from common.step.plan import EVAL_SPLIT, TRAIN_SPLIT, PlannedGroup, StepMode, StepPlan
from common.step.schedule import OWN_WEIGHTS, Schedule

if TYPE_CHECKING:
    from common.step.place import Place

SampleOrder = Callable[[StepIndex], Sequence[int]]
"""Rows of the training set that a step uses, in group order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The part of recipe and node that decides what the controller does next.

    Attributes:
        steps: number of updates.
        eval_rows: rows that one evaluation uses; 0: there is no evaluation.
        eval_every_steps: 0: before the first step and after the last only.
        checkpoint_every_steps: 0: on demand and at the end only.
        final_checkpoint: whether there is one at the end whatever else is set.
        max_drop_fraction: of all samples of the run.
        step_deadline_s: for one training step of `prompts_per_step` groups.
        replay_dir: recorded responses, fed to training steps instead of sampling; None: sample.
        ahead: whether plans name the groups of what comes next.
        place: of the rank of training that speaks for all.
        partners: the ranks of all services; None: as many as `place` says.
    """

    steps: int
    prompts_per_step: int
    samples_per_group: int
    schedule: Schedule
    eval_rows: int
    eval_every_steps: int
    checkpoint_every_steps: int
    final_checkpoint: bool
    max_drop_fraction: float
    needs_reference: bool
    step_deadline_s: float
    replay_dir: str | None
    ahead: bool
    place: Place
    order: SampleOrder
    partners: Partners | None = None

    def eval_due(self, version: int, first_version: int) -> bool:
        """Whether the weights of this version are to be evaluated."""
        first = self.eval_rows > 0 and version == first_version
        return first or self._evaluated_once_made(version)

    def _evaluated_once_made(self, version: int) -> bool:
        if self.eval_rows == 0:
            return False
        every = self.eval_every_steps
        return version == self.steps or (every > 0 and version % every == 0)

    def checkpoint_due(self, version: int) -> bool:
        """Whether the weights of this version are to be checkpointed unasked."""
        every = self.checkpoint_every_steps
        if version == self.steps and self.final_checkpoint:
            return True
        return every > 0 and version > 0 and version % every == 0

    def drops_allowed(self) -> int:
        """Most samples of the run that may be dropped."""
        return int(self.max_drop_fraction * self.steps * self.prompts_per_step)

    def deadline_s(self, plan: StepPlan) -> float:
        """Time for a step; an evaluation gets more in proportion to its groups."""
        return self.step_deadline_s * max(1.0, len(plan.groups) / self.prompts_per_step)

    def train_plan(self, run_id: RunId, step: StepIndex, epoch: Epoch) -> StepPlan:
        """The step that turns version `step` into `step + 1`."""
        return StepPlan(
            run_id=run_id,
            step=step,
            epoch=epoch,
            mode=StepMode.TRAIN,
            schedule=self.schedule,
            weights_version=WeightsVersion(step),
            groups=self._train_groups(step),
            samples_per_group=self.samples_per_group,
            replay_dir=self.replay_dir,
            ahead=self._after_update(step + 1) if self.ahead else (),
        )

    def eval_plan(self, run_id: RunId, step: StepIndex, epoch: Epoch) -> StepPlan:
        """One greedy response to each of the first rows of the held-out set, as one step."""
        return StepPlan(
            run_id=run_id,
            step=step,
            epoch=epoch,
            mode=StepMode.EVAL,
            schedule=self.schedule if self.schedule in OWN_WEIGHTS else Schedule.SERIAL,
            weights_version=WeightsVersion(step),
            groups=self._eval_groups(),
            samples_per_group=1,
            greedy=True,
            ahead=self._next_training(step) if self.ahead else (),
        )

    def _after_update(self, version: int) -> tuple[PlannedGroup, ...]:
        """Groups of what follows the update that makes a version."""
        if self._evaluated_once_made(version):
            return self._eval_groups()
        return self._next_training(version)

    def _next_training(self, version: int) -> tuple[PlannedGroup, ...]:
        """Groups of the step that trains a version; none, if that is the last one."""
        return () if version >= self.steps else self._train_groups(StepIndex(version))

    def _train_groups(self, step: StepIndex) -> tuple[PlannedGroup, ...]:
        return self._groups(TRAIN_SPLIT, self.order(step))

    def _eval_groups(self) -> tuple[PlannedGroup, ...]:
        return self._groups(EVAL_SPLIT, range(self.eval_rows))

    def _groups(self, split: str, samples: Sequence[int]) -> tuple[PlannedGroup, ...]:
        """In turn to the replicas of either side."""
        partners = self.partners or Partners.alike(
            degree=self.place.degree, replicas=self.place.replicas
        )
        return tuple(
            PlannedGroup(
                group=GroupId(index),
                split=split,
                sample=sample,
                replica=partners.bound(index, Service.LEARNER),
                rollout_replica=partners.bound(index, Service.ROLLOUT),
            )
            for index, sample in enumerate(samples)
        )
