"""Whether the reference's weights leave their device while nothing reads them.

That costs a copy back each step, beside the decode or the vision tower. It is worth that where the
room that it makes is missing, and nowhere else. Ranks that share a budget come to the same, from
what all of them take; each GPU has one of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.tensors.parts import in_flight_bytes
from common.tensors.spec import Residency
from common.worker.optimizer_parts import optimizer_sizes
from common.worker.weights import policy_layout

if TYPE_CHECKING:
    from common.weights.layout import WeightLayout
    from common.worker.context import RunContext


def reference_residency(context: RunContext, reference: WeightLayout) -> Residency:
    """What `training.spill_reference` comes to for a run on this device."""
    wanted = context.recipe.training.spill_reference
    if wanted == "auto":
        broker = context.broker
        wanted = context.device.type == "cuda" and budget_is_short(
            context,
            policy_layout(context),
            reference,
            capacity_bytes=broker.capacity_bytes,
            copies_bytes=broker.copies_bytes,
        )
    return Residency.SPILLABLE if wanted else Residency.PINNED


def spilled_bytes(context: RunContext, policy: WeightLayout, reference: WeightLayout) -> int:
    """What leaves the device of one rank's spillable reference weights when nothing reads them.

    Returns: 0 where the host has no room for the copy beside the optimizer's.
    """
    fits = _copies_bytes(context, policy, reference) <= context.broker.copies_bytes
    return reference.total_elements * context.dtype.itemsize if fits else 0


def budget_is_short(
    context: RunContext,
    policy: WeightLayout,
    reference: WeightLayout,
    *,
    capacity_bytes: int,
    copies_bytes: int,
) -> bool:
    """Whether the device lacks room that spilled reference weights of all ranks on it would make.

    While the run trains and updates, all its other storages are on the device, of the optimizer's
    state the parts in flight where it is spilled, beside what a step allocates:
    `training.graph_reserve_gib`. Where the budget has room for all of that and for the reference,
    spilling makes none that is missing. It makes none either where the host has no room for the
    copy, beside the optimizer's, which leaves for longer.

    Args:
        policy, reference: of one rank.
        capacity_bytes: what the broker may hand out of the device.
        copies_bytes: what it may take of the host for spilled contents.
    """
    parts = optimizer_sizes(context, policy)
    optimizer = in_flight_bytes(parts) if context.spills_optimizer else sum(parts)
    sharing = 1 if context.device.type == "cuda" else context.place.world
    storages = sharing * (
        (policy.total_elements + reference.total_elements) * context.dtype.itemsize
        + policy.trainable_elements * context.accumulator_dtype.itemsize
        + optimizer
    )
    copies = _copies_bytes(context, policy, reference)
    reserve = context.recipe.training.graph_reserve_gib * 2**30
    return storages + reserve > capacity_bytes and copies <= copies_bytes


def _copies_bytes(context: RunContext, policy: WeightLayout, reference: WeightLayout) -> int:
    """Of everything that a run with spilled reference weights spills, on all ranks."""
    optimizer = sum(optimizer_sizes(context, policy)) if context.spills_optimizer else 0
    return context.place.world * (reference.total_elements * context.dtype.itemsize + optimizer)
