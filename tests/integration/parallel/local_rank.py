"""One of four ranks: what sums over ranks by itself, without any kernels. Saves what came out.

Arguments: rank, file of the rendezvous, folder for results.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from common.vlm.cuda.gradients import shared_gradients
from common.vlm.parallel.group import RankGroup
from common.vlm.parallel.local import InputSplitLinear, OutputSplitLinear, RankEmbedding
from tests.integration.parallel.world import WORLD, join, meshes

ROWS, WIDTH, INNER, VOCABULARY, KV_PARTS = 7, 6, 8, 12, 2


def whole(*shape, seed):
    """Values that all ranks and the test make alike."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids():
    """Some twice, and some ranks without any."""
    return torch.tensor([5, 4, 11, 5, 3, 9, 10])


def part(values, rank, axis=0, parts=WORLD):
    return values.chunk(parts, dim=axis)[rank]


def parameter(values):
    return nn.Parameter(values.clone())


def embedding(group, *, accumulate):
    module = RankEmbedding(VOCABULARY // WORLD, WIDTH)
    module.group = group
    module.weight = parameter(part(whole(VOCABULARY, WIDTH, seed=0), group.rank))
    if accumulate:
        module.weight.grad = torch.ones_like(module.weight)
    out = module(ids())
    (out * whole(ROWS, WIDTH, seed=1)).sum().backward()
    return out.detach(), module.weight.grad


def pair(group):
    """A projection by output rows and one by input columns behind it."""
    first = OutputSplitLinear(WIDTH, INNER // WORLD)
    second = InputSplitLinear(INNER // WORLD, WIDTH)
    first.group = second.group = group
    first.weight = parameter(part(whole(INNER, WIDTH, seed=2), group.rank))
    first.bias = parameter(part(whole(INNER, seed=3), group.rank))
    second.weight = parameter(part(whole(WIDTH, INNER, seed=4), group.rank, axis=1))
    second.bias = parameter(whole(WIDTH, seed=5))
    inputs = parameter(whole(ROWS, WIDTH, seed=6))
    out = second(torch.tanh(first(inputs)))
    (out * whole(ROWS, WIDTH, seed=7)).sum().backward()
    gradients = [p.grad for p in (first.weight, first.bias, second.weight, second.bias, inputs)]
    return out.detach(), gradients


def shared(group, *, frozen):
    """Gradients of a weight and a bias, each of two parts that two ranks share."""
    sharer = group.rank * KV_PARTS // WORLD
    weight = parameter(part(whole(4, WIDTH, seed=8), sharer, parts=KV_PARTS).float())
    bias = parameter(part(whole(4, seed=9), sharer, parts=KV_PARTS).float())
    bias.grad = torch.ones_like(bias)
    if frozen:
        weight.requires_grad_(False)
        bias.requires_grad_(False)
    of_weights, of_biases = shared_gradients(
        [weight],
        [bias],
        whole(ROWS, 2, seed=10 + group.rank).float(),
        whole(ROWS, WIDTH, seed=20).float(),
        group=group,
        parts=KV_PARTS,
    )
    return of_weights[0], of_biases[0], bias.grad


def main(rank, rendezvous, folder):
    join(rank, rendezvous)
    group = RankGroup(meshes()[WORLD])
    gathered = torch.empty(WORLD, 3, 2)
    group.gather(torch.full((3, 2), float(group.rank)), gathered)
    result = {
        "embedding": embedding(group, accumulate=False),
        "accumulated": embedding(group, accumulate=True),
        "pair": pair(group),
        "shared": shared(group, frozen=False),
        "frozen": shared(group, frozen=True),
        "gathered": gathered,
    }
    torch.save(result, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
