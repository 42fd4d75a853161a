"""What one step consists of: everything that a retried epoch must repeat."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from common.ids import Epoch, GroupId, RunId, Service, StepIndex, WeightsVersion
from common.step.schedule import Schedule
from protos.rollplex.v1 import common_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable


class StepMode(StrEnum):
    """Why the step is done."""

    TRAIN = "train"
    EVAL = "eval"
    """Vision, decode and reward only; the weights stay."""


TRAIN_SPLIT = "train"
"""`PlannedGroup.split` of the rows that are trained on."""
EVAL_SPLIT = "eval"
"""`PlannedGroup.split` of the held-out rows."""

_MODES = {
    StepMode.TRAIN: pb.STEP_MODE_TRAIN,
    StepMode.EVAL: pb.STEP_MODE_EVAL,
}


def mode_to_proto(mode: StepMode) -> pb.StepMode.ValueType:
    """The wire value of a step mode."""
    return _MODES[mode]


def mode_from_proto(value: int) -> StepMode:
    """Raises KeyError for a value that this version does not know."""
    return {wire: mode for mode, wire in _MODES.items()}[pb.StepMode.ValueType(value)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """One prompt of the step: row `sample` of the data split `split`."""

    group: GroupId
    split: str
    sample: int
    replica: int = 0
    """Which data-parallel replica of training does its part of the group."""
    rollout_replica: int = 0
    """Which replica of the rollout decodes it."""

    def replica_of(self, service: Service) -> int:
        """The replica of a service that works on the group."""
        return self.rollout_replica if service is Service.ROLLOUT else self.replica


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The step as the controller planned it."""

    run_id: RunId
    step: StepIndex
    epoch: Epoch
    mode: StepMode
    schedule: Schedule
    weights_version: WeightsVersion
    groups: tuple[PlannedGroup, ...]
    samples_per_group: int
    greedy: bool = False
    replay_dir: str | None = None
    """Folder of recorded responses to replay instead of sampling."""
    ahead: tuple[PlannedGroup, ...] = ()
    """Groups of what is likely to come next: a hint. Nothing may depend on its being right."""

    def to_proto(self) -> pb.StepPlan:
        """The wire form."""
        return pb.StepPlan(
            run_id=self.run_id,
            step=self.step,
            epoch=self.epoch,
            mode=mode_to_proto(self.mode),
            schedule=self.schedule,
            weights_version=self.weights_version,
            groups=_groups_to_proto(self.groups),
            samples_per_group=self.samples_per_group,
            greedy=self.greedy,
            replay_dir=self.replay_dir,
            ahead=_groups_to_proto(self.ahead),
        )

    @classmethod
    def from_proto(cls, message: pb.StepPlan) -> StepPlan:
        """Read the wire form."""
        return cls(
            run_id=RunId(message.run_id),
            step=StepIndex(message.step),
            epoch=Epoch(message.epoch),
            mode=mode_from_proto(message.mode),
            schedule=Schedule(message.schedule),
            weights_version=WeightsVersion(message.weights_version),
            groups=_groups_from_proto(message.groups),
            samples_per_group=message.samples_per_group,
            greedy=message.greedy,
            replay_dir=message.replay_dir if message.HasField("replay_dir") else None,
            ahead=_groups_from_proto(message.ahead),
        )


def _groups_to_proto(groups: Iterable[PlannedGroup]) -> list[pb.PlannedGroup]:
    return [
        pb.PlannedGroup(
            group=g.group,
            split=g.split,
            sample=g.sample,
            replica=g.replica,
            rollout_replica=g.rollout_replica,
        )
        for g in groups
    ]


def _groups_from_proto(messages: Iterable[pb.PlannedGroup]) -> tuple[PlannedGroup, ...]:
    return tuple(
        PlannedGroup(
            group=GroupId(m.group),
            split=m.split,
            sample=m.sample,
            replica=m.replica,
            rollout_replica=m.rollout_replica,
        )
        for m in messages
    )
