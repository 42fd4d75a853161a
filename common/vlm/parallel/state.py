"""State that is spread over the ranks: whole tensors from shards, and the norm of all gradients.

Shapes: Et = trainable elements of a rank.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from common.vlm.checkpoint import DEFAULT_SHARD_BYTES, write_checkpoint
from common.vlm.parallel.modules import group_sum
from common.vlm.parallel.shards import rank_layout, shards
from common.weights.binding import torch_dtype, views

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import Qwen2_5_VLConfig

    from common.vlm.parallel.shards import Shard
    from common.vlm.shape import ModelShape
    from common.weights.layout import TensorEntry, WeightLayout


def take_shard(whole: Tensor, part: Shard) -> Tensor:
    """A rank's part of a whole tensor; fresh storage if it has several boxes."""
    pieces = [whole[tuple(slice(*one) for one in box.ranges)] for box in part.boxes]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def put_shard(whole: Tensor, part: Shard, values: Tensor) -> None:
    """Write a rank's part into the whole tensor."""
    rows = [box.shape[0] for box in part.boxes]
    for box, piece in zip(part.boxes, values.split(rows), strict=True):
        whole[tuple(slice(*one) for one in box.ranges)] = piece


class GlobalNorm:
    """The norm of all gradients of all ranks, each distinct element counted once.

    For `common.rl.optimizer.ready_gradients`; the same number on every rank.
    """

    def __init__(
        self,
        layout: WeightLayout,
        parts: Mapping[str, Shard] | None,
        *,
        meshes: Sequence[DeviceMesh],
        elements: slice | None = None,
    ) -> None:
        """Find what this rank counts.

        Args:
            layout: of this rank.
            parts: of this rank; None: it has the whole model.
            meshes: of the ranks, in as many dimensions as there are.
            elements: of the trainable ones, those that are this rank's to count; None: all of them.
        """
        self._meshes = tuple(meshes)
        start, stop = (0, layout.trainable_elements) if elements is None else _ends(elements)
        spans = [
            (entry.offset_elements, entry.offset_elements + entry.numel)
            for entry in layout.trainable_entries
            if parts is None or parts[entry.name].holders[0] == layout.rank
        ]
        self._counted = [
            slice(max(start, first) - start, min(stop, last) - start)
            for first, last in spans
            if first < stop and last > start
        ]

    def __call__(self, gradients: Tensor) -> float:
        """The norm; NaN or infinite if any rank's part is.

        Args:
            gradients: [Et] of this rank, or those of `elements`; only read.
        Sync: one, and one sum over the ranks of each mesh.
        """
        squares = gradients.new_zeros((), dtype=torch.float64)
        for part in self._counted:
            squares += torch.linalg.vector_norm(gradients[part], dtype=torch.float64) ** 2
        for mesh in self._meshes:
            squares = group_sum(squares, mesh)
        return math.sqrt(float(squares))


def _ends(elements: slice) -> tuple[int, int]:
    return elements.start, elements.stop


def save_shards(
    path: str | Path,
    config: Qwen2_5_VLConfig,
    layout: WeightLayout,
    shape: ModelShape,
    tensors: Mapping[str, Tensor],
    mesh: DeviceMesh,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write a checkpoint of the whole model from all ranks' weights; every rank has to call this.

    Rank 0 of the mesh gathers one tensor at a time and writes the files, as `write_checkpoint`.

    Args:
        path, config, max_shard_bytes: as there; rank 0's are used.
        layout: of the whole model (world 1).
        shape: of the model.
        tensors: of this rank, by name.
        mesh: of the ranks.
    """
    degree = mesh.size()
    parts = [shards(layout, shape, rank=rank, degree=degree) for rank in range(degree)]
    rank = mesh.get_local_rank()

    def whole(entry: TensorEntry) -> Tensor:
        return _gather(tensors[entry.name], [one[entry.name] for one in parts], mesh)

    if rank == 0:
        write_checkpoint(
            path,
            config,
            layout,
            whole,
            dtype=torch_dtype(layout),
            max_shard_bytes=max_shard_bytes,
        )
    else:
        for entry in layout.entries:
            whole(entry)


def gather_trainable(
    flat: Tensor, layout: WeightLayout, shape: ModelShape, mesh: DeviceMesh
) -> Tensor | None:
    """All ranks' masters or moments as one rank alone would have them; every rank has to call this.

    Args:
        flat: [Et] of this rank.
        layout: of the whole model (world 1).
        shape: of the model.
        mesh: of the ranks.
    Returns: [Et of the whole model] on the host, padding zero, on rank 0; None on the others.
    """
    degree, rank = mesh.size(), mesh.get_local_rank()
    parts = [shards(layout, shape, rank=one, degree=degree) for one in range(degree)]
    names = [entry.name for entry in layout.trainable_entries]
    own = views(flat, rank_layout(layout, parts[rank], rank=rank, degree=degree), names)
    whole = flat.new_zeros(layout.trainable_elements, device="cpu") if rank == 0 else None
    places = {} if whole is None else views(whole, layout, names)
    for name in names:
        gathered = _gather(own[name], [one[name] for one in parts], mesh)
        if whole is not None:
            places[name].copy_(gathered)
    return whole


def take_trainable(
    whole: Tensor, layout: WeightLayout, own: WeightLayout, parts: Mapping[str, Shard], flat: Tensor
) -> None:
    """Fill a rank's masters or moments from those of the whole model.

    Args:
        whole: [Et of the whole model].
        layout: of the whole model (world 1).
        own, parts: of this rank.
        flat: [Et] of this rank; written, padding set to zero.
    """
    flat.zero_()
    names = [entry.name for entry in layout.trainable_entries]
    values = views(whole, layout, names)
    for name, place in views(flat, own, names).items():
        place.copy_(take_shard(values[name], parts[name]))


def _gather(own: Tensor, parts: list[Shard], mesh: DeviceMesh) -> Tensor:
    """The whole tensor on rank 0; on the others whatever they have of it."""
    rank = mesh.get_local_rank()
    if len(parts[rank].holders) == len(parts):
        return own
    received = [torch.empty_like(own) for _ in parts] if rank == 0 else None
    dist.gather(own.contiguous(), received, group=mesh.get_group(), group_dst=0)
    if received is None:
        return own
    result = own.new_empty(parts[0].whole)
    for part, values in zip(parts, received, strict=True):
        put_shard(result, part, values)
    return result
