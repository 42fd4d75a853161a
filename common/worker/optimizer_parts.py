"""The optimizer's state as storages: contiguous ranges of the trainable weights, one a part.

Of several replicas each has the state of a share of its weights, and nothing of the others'.

Shapes: n elements of a part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.tensors.parts import part_names
from common.tensors.spec import DType, Residency, TensorSpec
from common.tensors.storage import StorageSpec
from common.weights.cuts import cuts, shares
from common.worker.scope import dtype_name

if TYPE_CHECKING:
    from common.ids import Participant
    from common.weights.layout import WeightLayout
    from common.worker.context import RunContext

POLICY_OPTIMIZER = "policy.optimizer"
"""The whole; its parts are numbered."""

MASTERS = "masters"
"""[n] in the accumulator's dtype; only where the compute dtype is another one."""
MOMENTS = "moments"
"""[2, n] in the accumulator's dtype: AdamW's first and second moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPart:
    """One part's storage.

    Attributes:
        name: `policy.optimizer.<number>`; of rank 1, `policy.optimizer/1.<number>`.
        elements: of the flat trainable weights, which masters and moments it has.
    """

    name: str
    elements: slice
    spec: StorageSpec


def optimizer_parts(
    context: RunContext, layout: WeightLayout, owner: Participant
) -> tuple[OptimizerPart, ...]:
    """All parts, in the order of the weights; one at least."""
    dtype: DType = dtype_name(context.accumulator_dtype)
    residency = Residency.SPILLABLE if context.spills_optimizer else Residency.PINNED
    ranges = _ranges(context, layout, context.place.replica)
    parts = []
    names = part_names(context.storage_name(POLICY_OPTIMIZER), len(ranges))
    for name, elements in zip(names, ranges, strict=True):
        size = elements.stop - elements.start
        tensors = [TensorSpec(name=MOMENTS, dtype=dtype, shape=(2, size))]
        if has_masters(context):
            tensors.append(TensorSpec(name=MASTERS, dtype=dtype, shape=(size,)))
        spec = StorageSpec(
            tensors=tuple(tensors), readers=(), writers=(owner,), residency=residency
        )
        parts.append(OptimizerPart(name=name, elements=elements, spec=spec))
    return tuple(parts)


def optimizer_sizes(context: RunContext, layout: WeightLayout) -> list[int]:
    """Bytes of each part's tensors, in the replica that has most."""
    ranges = _ranges(context, layout, context.place.replicas - 1)
    return [_element_bytes(context) * (part.stop - part.start) for part in ranges]


def _ranges(context: RunContext, layout: WeightLayout, replica: int) -> list[slice]:
    """What of the flat trainable weights each part of a replica is for."""
    share = shares(layout.trainable_elements, context.place.replicas)[replica]
    parts = cuts(
        share.stop - share.start,
        element_bytes=_element_bytes(context),
        part_mib=context.recipe.training.optimizer_part_mib,
    )
    return [slice(share.start + part.start, share.start + part.stop) for part in parts]


def has_masters(context: RunContext) -> bool:
    """Whether masters are other tensors than the weights."""
    return context.dtype is not context.accumulator_dtype


def _element_bytes(context: RunContext) -> int:
    return context.accumulator_dtype.itemsize * (3 if has_masters(context) else 2)
