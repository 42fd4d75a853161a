"""A plan carried out in NumPy: buffers, training's writes, copies, and what the rollout reads."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from common.layouts.sharing import Kind

UNWRITTEN = -1


def logical_values(layout):
    """By name: a whole tensor whose elements all differ from those of every other, and from 0."""
    tensors = {
        part.tensor.name: part.tensor for rank in layout.ranks for one in rank for part in one.parts
    }
    values, start = {}, 1
    for name, tensor in sorted(tensors.items()):
        values[name] = np.arange(start, start + tensor.numel).reshape(tensor.shape)
        start += tensor.numel
    return values


def shard(tensor, values):
    """What a rank's tensor has to be: parts joined along the rows, padding 0."""
    pieces = []
    for part in tensor.parts:
        piece = np.zeros(part.box.shape, dtype=np.int64)
        if part.real is not None:
            region = tuple(slice(*ends) for ends in part.real.ranges)
            inside = tuple(slice(0, size) for size in part.real.shape)
            piece[inside] = values[part.tensor.name][region]
        pieces.append(piece)
    return np.concatenate(pieces)


def strided(flat, view):
    """The memory of a view, with its axes for blocks."""
    assert min(view.strides) > 0
    last = view.offset + sum(
        (size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)
    )
    assert 0 <= view.offset <= last < flat.size
    steps = tuple(stride * flat.itemsize for stride in view.strides)
    return as_strided(flat[view.offset :], view.shape, steps)


class Gpu:
    """All buffers of one GPU."""

    def __init__(self, sharing, values):
        self.sharing = sharing
        self.values = values
        self.flats = [
            np.full(one.storage_elements, UNWRITTEN, dtype=np.int64) for one in sharing.clusters
        ]
        self.own = {
            one.tensor.name: np.full(one.tensor.shape, UNWRITTEN, dtype=np.int64)
            for cluster in sharing.clusters
            for one in cluster.rollout
            if one.kind is Kind.REBUILD
        }

    def train(self):
        """Memory of every training tensor, with the tensor."""
        for flat, cluster in zip(self.flats, self.sharing.clusters, strict=True):
            for tensor, view in zip(cluster.train, cluster.train_views, strict=True):
                yield tensor, strided(flat, view)

    def rollout(self):
        """Memory of every tensor of the rollout, with its plan."""
        for flat, cluster in zip(self.flats, self.sharing.clusters, strict=True):
            for one in cluster.rollout:
                yield (
                    one,
                    (self.own[one.tensor.name] if one.view is None else strided(flat, one.view)),
                )

    def clear_padding(self):
        """Done once, when the buffers are made."""
        for one, memory in self.rollout():
            padding = shard(one.tensor, self.values).reshape(memory.shape) == 0
            memory[padding] = 0

    def update(self):
        """The optimizer's write."""
        for tensor, memory in self.train():
            memory[...] = shard(tensor, self.values).reshape(memory.shape)

    def read(self, name, box):
        """A box of a logical tensor out of training's memory."""
        for tensor, memory in self.train():
            whole = memory.reshape(tensor.shape)
            for row, part in tensor.placed_parts():
                if part.tensor.name == name and part.box.contains(box):
                    return whole[_region(row, part, box)].copy()
        raise AssertionError(f"no training tensor has {name} {box}")


def carry_out(plan, values):
    """Update every GPU, copy what the plan copies, and hold everything against what it must be."""
    gpus = [Gpu(sharing, values) for sharing in plan.gpus]
    for gpu in gpus:
        gpu.clear_padding()
        gpu.update()
    received = []
    for number, gpu in enumerate(gpus):
        first = number - number % plan.train.degree
        for one, memory in gpu.rollout():
            tensor = one.tensor
            data = np.full(tensor.shape, UNWRITTEN, dtype=np.int64)
            rows = list(tensor.placed_parts())
            for move in one.moves:
                row, part = rows[move.part]
                source = gpu if move.source is None else gpus[first + move.source]
                region = _region(row, part, move.box)
                assert (data[region] == UNWRITTEN).all(), "an element is copied twice"
                data[region] = source.read(part.tensor.name, move.box)
            received.append((one, memory, data.reshape(memory.shape)))
    for one, memory, data in received:
        copied = data != UNWRITTEN
        padding = shard(one.tensor, values) == 0
        assert one.alias_elements == data.size - copied.sum() - padding.sum()
        memory[copied] = data[copied]
    for gpu in gpus:
        for tensor, memory in gpu.train():
            assert (memory.reshape(tensor.shape) == shard(tensor, values)).all(), tensor.name
        for one, memory in gpu.rollout():
            assert (memory.reshape(one.tensor.shape) == shard(one.tensor, values)).all(), one.tensor


def _region(row, part, box):
    (start, stop), *rest = box.ranges
    (first, _), *origins = part.box.ranges
    return (
        slice(row + start - first, row + stop - first),
        *(slice(a - c, b - c) for (a, b), (c, _) in zip(rest, origins, strict=True)),
    )
