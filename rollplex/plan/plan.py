"""The plans of a request: naive colocation, and what each schedule keeps so that it fits."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.step.schedule import OWN_WEIGHTS, Schedule
from common.tensors.parts import PARTS_IN_FLIGHT
from rollplex.plan.lifetimes import ONE_BY_ONE, naive, rollout_apart, scheduled
from rollplex.plan.sizes import Sizes
from rollplex.plan.table import Phase, TensorClass

if TYPE_CHECKING:
    from rollplex.plan.request import PlanRequest
    from rollplex.plan.table import Table

NAIVE = "naive"
"""The name of naive colocation among the schedules."""
ROLLOUT_APART = f"{Schedule.DISAGGREGATED} rollout"
"""The name of the plan for a GPU of the rollout alone, beside that for one that trains."""

RESTORE_AHEAD_GROUPS = 3
"""Groups still to be trained when the optimizer's state is sent back to the device, where there is
room for all of it that early."""

_GIB = 2**30
_LARGEST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to run the step on one GPU.

    Attributes:
        name: `NAIVE`, a schedule, or `ROLLOUT_APART`.
        graphs: prefixes whose graph is kept at a time.
        inputs: layer inputs only are kept, and layers run again in the backward.
        restore_ahead: groups still to be trained when the optimizer's state comes back; 0: its
            parts come back in the update, if they have left.
        host_bytes: of the GPU's tensors that are on the host while they are not needed.
        notes: what was chosen, and what that costs.
    """

    name: str
    sizes: Sizes
    graphs: int
    inputs: bool
    restore_ahead: int
    host_bytes: int
    table: Table
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether no phase needs more than the GPU has."""
        return self.table.peak <= self.sizes.request.budget_bytes

    @property
    def recipe(self) -> dict[str, str | int | bool]:
        """The recipe's table `training` for this plan; empty where that is another one's."""
        if self.name in (NAIVE, ROLLOUT_APART):
            return {}
        request = self.sizes.request
        return {
            "schedule": self.name,
            "prefix_graphs": self.graphs,
            "activation_checkpointing": self.inputs,
            "ahead": request.ahead,
            "spill_optimizer": request.spill_optimizer,
            "spill_reference": request.spill_reference,
            "restore_ahead_groups": self.restore_ahead,
        }

    @property
    def excess(self) -> dict[Phase, int]:
        """Bytes over the GPU's memory, of the phases that do not fit."""
        budget = self.sizes.request.budget_bytes
        over = {phase: self.table.total(phase) - budget for phase in Phase}
        return {phase: size for phase, size in over.items() if size > 0}

    def largest(self, phase: Phase) -> list[TensorClass]:
        """The classes that take most in a phase."""
        rows = self.table.rows()
        return sorted(rows, key=lambda row: -self.table.get(row, phase))[:_LARGEST]


def plans(request: PlanRequest) -> tuple[Plan, ...]:
    """Naive colocation first, then every schedule, and the GPUs of a rollout that has its own.

    Raises: InvalidArgument if the request cannot be.
    """
    request.check()
    made = (_naive(request), *(_scheduled(request, schedule) for schedule in Schedule))
    return (*made, _rollout_apart(request))


def _naive(request: PlanRequest) -> Plan:
    sizes = Sizes(request, fused=False)
    graphs = min(request.groups, request.prefix_graphs or request.groups)
    return Plan(
        name=NAIVE,
        sizes=sizes,
        graphs=graphs,
        inputs=request.checkpointing,
        restore_ahead=0,
        host_bytes=0,
        table=naive(sizes, graphs=graphs, inputs=request.checkpointing),
        notes=("a process's memory stays at its largest: all phases are alike",),
    )


def _rollout_apart(request: PlanRequest) -> Plan:
    sizes = Sizes(request, fused=request.fused)
    return Plan(
        name=ROLLOUT_APART,
        sizes=sizes,
        graphs=0,
        inputs=False,
        restore_ahead=0,
        host_bytes=0,
        table=rollout_apart(sizes),
        notes=(f"as many GPUs again, for the rollout of {Schedule.DISAGGREGATED} alone",),
    )


def _scheduled(request: PlanRequest, schedule: Schedule) -> Plan:
    """The first choice that fits: as many graphs as there is room for, layer inputs at last."""
    most = 1 if schedule in ONE_BY_ONE else request.groups
    most = min(most, request.prefix_graphs or most)
    for inputs in _tiers(request):
        graphs = _most_graphs(request, schedule, most=most, inputs=inputs)
        for ahead in (RESTORE_AHEAD_GROUPS, 0) if request.spill_optimizer else (0,):
            plan = _choice(request, schedule, inputs=inputs, graphs=graphs, ahead=ahead)
            if plan.fits:
                return plan
    return plan


def _tiers(request: PlanRequest) -> tuple[bool, ...]:
    """Whether graphs are layer inputs only, by preference."""
    if request.checkpointing:
        return (True,)
    return (False,) if request.whole_graphs else (False, True)


def _most_graphs(request: PlanRequest, schedule: Schedule, *, most: int, inputs: bool) -> int:
    """As many as there is room for, up to `most`; 1 if there is none.

    Fewer graphs never take more, and nor does optimizer state that comes back in the update.
    """

    def too_many(graphs: int) -> bool:
        return not _choice(request, schedule, inputs=inputs, graphs=graphs, ahead=0).fits

    return max(1, bisect(range(1, most + 1), x=False, key=too_many))


def _choice(
    request: PlanRequest, schedule: Schedule, *, inputs: bool, graphs: int, ahead: int
) -> Plan:
    sizes = Sizes(request, fused=request.fused)
    table = scheduled(sizes, schedule, graphs=graphs, inputs=inputs, restore_ahead=ahead)
    return Plan(
        name=schedule.value,
        sizes=sizes,
        graphs=graphs,
        inputs=inputs,
        restore_ahead=ahead,
        host_bytes=_host_bytes(sizes),
        table=table,
        notes=_notes(sizes, schedule, inputs=inputs, graphs=graphs, ahead=ahead),
    )


def _host_bytes(sizes: Sizes) -> int:
    request = sizes.request
    optimizer = sizes.masters + sizes.moments if request.spill_optimizer else 0
    return optimizer + (sizes.weights(request.train_tp) if request.spill_reference else 0)


def _notes(
    sizes: Sizes, schedule: Schedule, *, inputs: bool, graphs: int, ahead: int
) -> tuple[str, ...]:
    request, groups = sizes.request, sizes.request.groups
    notes = []
    if schedule in OWN_WEIGHTS:
        notes.append(f"of a GPU that trains; those of the rollout: {ROLLOUT_APART}")
    if schedule in ONE_BY_ONE:
        notes.append("one prefix at a time runs forward and, with its graph, backward")
    else:
        again = groups - graphs
        rest = f"; {again} run forward again for their backward" if again else ""
        notes.append(f"graphs of {graphs} of {groups} prefixes are kept from the window on{rest}")
    if inputs:
        notes.append("of layers only the inputs are kept: every layer runs again in its backward")
    if not request.spill_optimizer:
        notes.append("optimizer state stays on the GPU")
    else:
        parts = len(sizes.optimizer_parts)
        few = f"in the update, {min(PARTS_IN_FLIGHT, parts)} of its {parts} parts at a time"
        when = f"with {ahead} groups left to train" if ahead else few
        notes.append(f"optimizer state is on the host from its update on, and back {when}")
    if request.spill_reference:
        notes.append("reference weights are on the host while nothing is scored or prepared for it")
    return tuple(notes)


def gib(size_bytes: int) -> str:
    """GiB with one decimal."""
    return f"{size_bytes / _GIB:.1f}"
