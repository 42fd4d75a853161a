"""A sharing plan as JSON. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.layouts.sharing import Kind

if TYPE_CHECKING:
    from common.layouts.plan import GpuSharing, SharingPlan
    from common.layouts.sharing import ClusterSharing, TensorSharing

SUMS = (
    "alias_bytes",
    "gather_bytes",
    "rebuild_bytes",
    "extra_bytes",
    "full_second_copy_bytes",
    "train_bytes",
)
"""Figures that are given for every GPU and summed over all."""


def document(plan: SharingPlan, *, tensors: bool, scratch: bool = True) -> dict[str, Any]:
    """The plan's bytes, by GPU and in all, and the placement of the rollout's ranks.

    Args:
        tensors: whether each tensor of the rollout is listed, with its bytes on all GPUs.
        scratch: whether it is carried out by collectives, which hold some memory meanwhile.
    """
    made: dict[str, Any] = {
        "train": {"layout": plan.train.name, "tp": plan.train.degree},
        "rollout": {"layout": plan.rollout.name, "tp": plan.rollout.degree},
        "gpus": len(plan.gpus),
        **{key: sum(getattr(gpu, key) for gpu in plan.gpus) for key in SUMS},
        "plain_order_alias_bytes": plan.plain_alias_bytes,
        "ranks": [_rank(gpu, scratch=scratch) for gpu in plan.gpus],
    }
    if scratch:
        made["scratch_bytes"] = max(gpu.scratch_bytes for gpu in plan.gpus)
    if tensors:
        made["tensors"] = _tensors(plan)
    return made


def _rank(gpu: GpuSharing, *, scratch: bool) -> dict[str, int]:
    made = {
        "gpu": gpu.gpu,
        "train_rank": gpu.train_rank,
        "rollout_replica": gpu.rollout_replica,
        "rollout_rank": gpu.rollout_rank,
        **{key: getattr(gpu, key) for key in SUMS},
    }
    if scratch:
        made["scratch_bytes"] = gpu.scratch_bytes
    return made


def _tensors(plan: SharingPlan) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for gpu in plan.gpus:
        for cluster in gpu.clusters:
            for one in cluster.rollout:
                row = rows.setdefault(one.tensor.name, _row(one))
                _add(row, one, cluster, gpu.element_bytes)
    for row in rows.values():
        row["kinds"] = [kind.value for kind in Kind if kind in row["kinds"]]
    return list(rows.values())


def _row(one: TensorSharing) -> dict[str, Any]:
    return {
        "names": list(one.tensor.names),
        "layers": one.tensor.count,
        "shape": list(one.tensor.shape),
        "kinds": set(),
        "strided": False,
        "train_blocks": False,
        "alias_bytes": 0,
        "gather_bytes": 0,
        "rebuild_bytes": 0,
    }


def _add(
    row: dict[str, Any], one: TensorSharing, cluster: ClusterSharing, element_bytes: int
) -> None:
    layer_bytes = element_bytes * one.tensor.count
    row["kinds"].add(one.kind)
    row["strided"] |= one.view is not None and not one.view.contiguous
    row["train_blocks"] |= any(view.blocks > 0 for view in cluster.train_views)
    row["alias_bytes"] += one.alias_elements * layer_bytes
    if one.kind is Kind.GATHER:
        row["gather_bytes"] += one.moved_elements * layer_bytes
    elif one.kind is Kind.REBUILD:
        row["rebuild_bytes"] += one.tensor.numel * layer_bytes
