"""A plan as one JSON document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollplex.plan.plan import plans
from rollplex.plan.reasons import assumptions, reasons
from rollplex.plan.sizes import Sizes
from rollplex.plan.table import Phase
from rollplex.plan.weights import parameter_count

if TYPE_CHECKING:
    from rollplex.plan.plan import Plan
    from rollplex.plan.request import PlanRequest


def document(request: PlanRequest) -> dict[str, Any]:
    """All plans of a request.

    Returns: JSON values; sizes are bytes a GPU. Top keys: `model`, `gpu`, `parallel`, `batch`,
        `switches`, `saved_bytes_a_token`, `assumptions`, `plans`.
    Raises: InvalidArgument if the request cannot be.
    """
    made = plans(request)
    batch, sizes = request.batch, Sizes(request, fused=request.fused)
    return {
        "model": {
            "name": request.shape.name,
            "type": request.shape.model_type,
            "parameters": parameter_count(request.shape),
        },
        "gpu": {
            "name": request.gpu,
            "budget_bytes": request.budget_bytes,
            "headroom_bytes": request.headroom_bytes,
        },
        "parallel": {
            "gpus": request.gpus,
            "train_tp": request.train_tp,
            "rollout_tp": request.rollout_tp,
            "replicas": request.replicas,
            "engines": request.rollout_replicas,
        },
        "batch": {
            "prompts": batch.prompts,
            "samples": batch.samples,
            "prompt_tokens": batch.prompt_tokens,
            "vision_tokens": batch.vision_tokens,
            "response_tokens": batch.response_tokens,
            "groups_a_replica": request.groups,
            "groups_in_flight": request.decoding_groups,
        },
        "switches": {
            "dtype": request.dtype,
            "optimizer_dtype": request.optimizer_dtype,
            "train_vision": request.train_vision,
            "checkpointing": request.checkpointing,
            "sequence_parallel": request.sequence_parallel,
            "shard_optimizer": request.shard_optimizer,
            "spill_optimizer": request.spill_optimizer,
            "spill_reference": request.spill_reference,
            "ahead": request.ahead,
        },
        "saved_bytes_a_token": {
            name: {tensor: round(size) for tensor, size in saved.items()}
            for name, saved in (
                ("naive", Sizes(request, fused=False).kept.prefix()),
                ("schedules", sizes.kept.prefix()),
            )
        },
        "assumptions": assumptions(request, sizes),
        "plans": [_plan(plan) for plan in made],
    }


def _plan(plan: Plan) -> dict[str, Any]:
    table, why = plan.table, reasons(plan)
    return {
        "name": plan.name,
        "fits": plan.fits,
        "peak_bytes": table.peak,
        "peak_phase": table.peak_phase.value,
        "host_bytes": plan.host_bytes,
        "prefix_graphs": plan.graphs,
        "layer_inputs_only": plan.inputs,
        "recipe": {"training": plan.recipe} if plan.recipe else {},
        "notes": list(plan.notes),
        "classes": [
            {
                "name": row.value,
                "why": why[row],
                "bytes": {phase.value: table.get(row, phase) for phase in Phase},
            }
            for row in table.rows()
        ],
        "totals": {phase.value: table.total(phase) for phase in Phase},
        "excess": [
            {
                "phase": phase.value,
                "bytes": size,
                "largest": [row.value for row in plan.largest(phase)],
            }
            for phase, size in plan.excess.items()
        ],
    }
