"""Whole models, the shards of them that a layout asks for, and whether a rank has its own."""

from __future__ import annotations

import torch

from common.layouts.sharing import Kind
from common.weights.resharding.buffers import allocate_sources
from common.weights.resharding.executor import Resharding

BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def whole_tensors(layout, dtype, seed):
    """Random bits by logical name and layer, none of them zero."""
    generator = torch.Generator().manual_seed(seed)
    bits = BITS[dtype]
    made = {}
    for rank in layout.ranks:
        for one in rank:
            for part in one.parts:
                for layer in range(one.count):
                    if (part.tensor.name, layer) not in made:
                        made[part.tensor.name, layer] = torch.randint(
                            1,
                            torch.iinfo(bits).max,
                            part.tensor.shape,
                            dtype=bits,
                            generator=generator,
                        ).view(dtype)
    return made


def shard(tensor, layer, whole):
    """What a rank's tensor has to be: parts joined along the rows, padding 0."""
    pieces = []
    for part in tensor.parts:
        full = whole[part.tensor.name, layer]
        piece = torch.zeros(part.box.shape, dtype=full.dtype)
        if part.real is not None:
            region = tuple(slice(*ends) for ends in part.real.ranges)
            inside = tuple(slice(0, size) for size in part.real.shape)
            piece[inside] = full[region]
        pieces.append(piece)
    return torch.cat(pieces)


def equal(memory, tensor, layer, whole):
    """Bit for bit, whatever blocks the memory lies in."""
    expected = shard(tensor, layer, whole)
    bits = BITS[expected.dtype]
    return torch.equal(memory.reshape(expected.shape).view(bits), expected.view(bits))


class Member:
    """One rank: training's memory, and the rollout's."""

    def __init__(self, plan, group, dtype, *, gpus=None, **options):
        chosen = range(len(plan.gpus)) if gpus is None else gpus
        self.gpu = plan.gpus[chosen[group.rank()]]
        self.dtype = dtype
        self.sources = allocate_sources(self.gpu, dtype=dtype, device=torch.device("cpu"))
        self.resharding = Resharding(plan, self.sources, group, gpus=gpus, **options)

    def train(self, whole):
        """The optimizer's write."""
        for one, layer in self._tensors(lambda cluster: cluster.train):
            for name in one.layer_names(layer)[:1]:
                memory = self.sources[name]
                memory.copy_(shard(one, layer, whole).reshape(memory.shape))

    def wrong(self, whole, *, kinds=tuple(Kind)):
        """Names that are not what they have to be."""
        wrong = [
            name
            for one, layer in self._tensors(lambda cluster: cluster.train)
            for name in one.layer_names(layer)
            if not equal(self.sources[name], one, layer, whole)
        ]
        for shared, layer in self.rollout():
            if shared.kind in kinds:
                wrong += [
                    name
                    for name in shared.tensor.layer_names(layer)
                    if not equal(self.resharding.targets[name], shared.tensor, layer, whole)
                ]
        return wrong

    def rollout(self):
        return self._tensors(lambda cluster: cluster.rollout)

    def sources_like(self, tensor, layer):
        """Training's tensors of a layer that have the same parts."""
        for one, at in self._tensors(lambda cluster: cluster.train):
            if (one.parts, at) == (tensor.parts, layer):
                yield one, self.sources[one.layer_names(layer)[0]]

    def _tensors(self, of):
        for cluster in self.gpu.clusters:
            for layer in range(cluster.train[0].count):
                for one in of(cluster):
                    yield one, layer


def two_updates(member, wholes):
    """Train, refresh, twice; everything that may go wrong is checked on the way."""
    gpu, resharding = member.gpu, member.resharding
    storage = next(iter(member.sources.values())).untyped_storage().data_ptr()
    for version, whole in enumerate(wholes, 1):
        member.train(whole)
        addresses = {name: one.data_ptr() for name, one in resharding.targets.items()}
        assert member.wrong(whole, kinds=[Kind.ALIAS]) == []
        done = resharding.update()
        assert member.wrong(whole) == []
        assert resharding.version == done.version == version
        assert (done.alias_bytes, done.gather_bytes, done.rebuild_bytes) == (
            gpu.alias_bytes,
            gpu.gather_bytes,
            gpu.rebuild_copied_bytes,
        )
        assert addresses == {name: one.data_ptr() for name, one in resharding.targets.items()}
    for shared, layer in member.rollout():
        target = resharding.targets[shared.tensor.layer_names(layer)[0]]
        shares = target.untyped_storage().data_ptr() == storage
        assert shares == (shared.kind is not Kind.REBUILD), shared.tensor.name
        for one, source in member.sources_like(shared.tensor, layer):
            if shared.kind is Kind.ALIAS:
                assert source.data_ptr() == target.data_ptr(), one.name
    return done
