"""What `rollplex plan` says of a measured run: its peak beside the one that was seen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bench.step_inputs import PER_RESPONSE, RESIDENT
from bench.step_summary import vision_tokens
from common.config.recipe import TrainingConfig
from common.step.schedule import Schedule
from common.vlm.shape import read_shape
from rollplex.plan.lifetimes import ONE_BY_ONE, scheduled
from rollplex.plan.plan import RESTORE_AHEAD_GROUPS, plans
from rollplex.plan.request import GPU_BYTES, Batch, PlanRequest
from rollplex.plan.sizes import RESERVE_BYTES, Sizes

if TYPE_CHECKING:
    from pathlib import Path

    from bench.step_workloads import Workload

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One schedule on one GPU.

    Attributes:
        peak_bytes: of the phase with the most.
        graphs: prefixes whose graph is kept at a time.
        fits: whether the peak is within the budget.
    """

    peak_bytes: int
    graphs: int
    fits: bool

    def figures(self, measured_gib: float | None) -> dict[str, Any]:
        """For a report. Args: measured_gib: the peak that was seen; None: none was."""
        planned_gib = self.peak_bytes / _GIB
        return {
            "planned_peak_gib": planned_gib,
            "peak_over_planned": None if measured_gib is None else measured_gib / planned_gib,
            "planned_graphs": self.graphs,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Plans a workload's steps as the services run them, all ranks of one node.

    Attributes:
        work: what a step consists of.
        model: its folder, for the shape.
        device: of the services; on `cpu` there are no contexts, and none are planned.
        gpu: a key of `GPU_BYTES`.
        budget_gib: of memory that is to be enough; None: all of the GPU.
        group_tokens: of all responses of the group that has most; None: as many as all have if each
            is as long as the longest.
        graphs: as in the recipe: a number, `auto`, or `all`, which are kept if they fit or not.
        spill_optimizer: whether the optimizer's state is on the host while no update needs it.
        ranks: tensor-parallel ranks of each service.
    """

    work: Workload
    model: Path
    device: str
    gpu: str
    budget_gib: float | None = None
    group_tokens: int | None = None
    graphs: int | str = "auto"
    spill_optimizer: bool = True
    checkpointing: bool = False
    ahead: bool = True
    ranks: int = 1

    def of(self, schedule: str) -> Planned | None:
        """None: the plan does not know this schedule."""
        if schedule == PER_RESPONSE:
            return None
        if schedule == RESIDENT:
            return replace(self, spill_optimizer=False).of(Schedule.SERIAL)
        request = self._request()
        if self.graphs == "all":
            groups = 1 if schedule in ONE_BY_ONE else request.groups
            peak_bytes = scheduled(
                Sizes(request, fused=request.fused),
                Schedule(schedule),
                graphs=groups,
                inputs=self.checkpointing,
                restore_ahead=RESTORE_AHEAD_GROUPS if self.spill_optimizer else 0,
            ).peak
        else:
            plan = next(plan for plan in plans(request) if plan.name == schedule)
            peak_bytes, groups = plan.table.peak, plan.graphs
        return Planned(
            peak_bytes=peak_bytes - self._unused_bytes,
            graphs=groups,
            fits=peak_bytes <= request.budget_bytes,
        )

    @property
    def _unused_bytes(self) -> int:
        return RESERVE_BYTES if self.device == "cpu" else 0

    def _request(self) -> PlanRequest:
        work = self.work
        request = PlanRequest(
            shape=read_shape(str(self.model)),
            gpu=self.gpu,
            gpus=self.ranks,
            train_tp=self.ranks,
            rollout_tp=self.ranks,
            batch=Batch(
                prompts=work.prompts,
                samples=work.samples,
                prompt_tokens=work.prompt_tokens,
                vision_tokens=vision_tokens(work),
                response_tokens=work.lengths.max_tokens,
                group_tokens=self.group_tokens,
            ),
            prefix_graphs=self.graphs if isinstance(self.graphs, int) else None,
            dtype=work.dtype,
            train_vision=work.train_vision,
            checkpointing=self.checkpointing,
            whole_graphs=not self.checkpointing,
            spill_optimizer=self.spill_optimizer,
            ahead=self.ahead,
        )
        if self.budget_gib is not None:
            budget_bytes = int(self.budget_gib * _GIB) + self._unused_bytes
            request = replace(request, headroom_bytes=GPU_BYTES[self.gpu] - budget_bytes)
        return replace(request, spill_reference=self._spills_reference(request))

    def _spills_reference(self, request: PlanRequest) -> bool:
        """What `training.spill_reference = "auto"` comes to, with room for the copies."""
        if self.device == "cpu" or not self.spill_optimizer:
            return False
        sizes = Sizes(request, fused=request.fused)
        parts = sizes.masters_of(sizes.in_flight_elements) + sizes.moments_of(
            sizes.in_flight_elements
        )
        storages = 2 * sizes.weights(self.ranks) + sizes.accumulator + parts
        handed_out = GPU_BYTES[self.gpu] - RESERVE_BYTES
        if self.budget_gib is not None:
            handed_out = request.budget_bytes
        reserve = TrainingConfig(prompts_per_step=1, steps=1).graph_reserve_gib * _GIB
        return storages + reserve > handed_out
