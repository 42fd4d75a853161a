"""One rank: runs every scenario at every degree of which it is a member and saves what came out.

Arguments: rank, file of the rendezvous, folder for results.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from common.rl.optimizer import FlatAdamW, ready_gradients
from common.vlm.bound import bound_model
from common.vlm.checkpoint import load_checkpoint
from common.vlm.loading import empty_model
from common.vlm.parallel.model import config_shape, parallel_model
from common.vlm.parallel.shards import rank_layout, shards
from common.vlm.parallel.state import GlobalNorm, save_shards, take_shard
from common.vlm.prefix import packed_shape, prefix_backward
from common.vlm.verification import split_backward
from common.weights.binding import bind_parameters, views
from services.rollout.engines.native import NativeEngine
from services.rollout.engines.protocol import GroupRequest, StepSpec
from tests.integration.parallel.scenarios import ALGORITHM, SCENARIOS, TEMPERATURE, TOKENS
from tests.integration.parallel.world import RUNS, join, meshes

OPERATORS = {
    torch.ops.c10d.allreduce_.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


class Collectives(TorchDispatchMode):
    """Counts collectives while it is entered."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        self.count += func in OPERATORS
        return func(*args, **(kwargs or {}))


class Rank:
    """A scenario's model as one rank of one degree has it."""

    def __init__(self, scenario, mesh):
        self.scenario, self.mesh = scenario, mesh
        self.rank, self.degree = mesh.get_local_rank(), mesh.size()
        whole = bound_model(
            scenario.config,
            dtype=scenario.dtype,
            train_vision=scenario.train_vision,
            std=0.2,
        )
        self.whole = whole.layout
        self.shape = config_shape(scenario.config)
        self.parts = shards(self.whole, self.shape, rank=self.rank, degree=self.degree)
        self.layout = rank_layout(self.whole, self.parts, rank=self.rank, degree=self.degree)
        self.weights = torch.zeros(self.layout.total_elements, dtype=scenario.dtype)
        self.gradients = torch.zeros(self.layout.trainable_elements, dtype=scenario.dtype)
        self.split = self.bound(mesh, self.gradients)
        values = views(whole.weights, self.whole)
        for name, view in views(self.weights, self.layout).items():
            view.copy_(take_shard(values[name], self.parts[name]))

    def bound(self, mesh, gradients):
        """The split passes on a mesh, with this rank's weights."""
        model = empty_model(self.scenario.config, dtype=self.scenario.dtype)
        split = parallel_model(model, mesh, logit_chunk_tokens=4)
        bind_parameters(model, self.layout, self.weights, gradients)
        return split

    @torch.no_grad()
    def prefixes(self, split):
        """[L, 2, K, P, D] of each case, K those of this rank."""
        buffers = []
        for case in self.scenario.cases:
            prefix = split.prefix_kv(case.prompt, split.vision_embeddings(case.prompt))
            shape = packed_shape(split.config, prefix.tokens, kv_heads=split.kv_heads)
            buffers.append(torch.zeros(shape, dtype=split.dtype))
            prefix.pack(buffers[-1])
        return buffers

    def prefixes_beside_each_other(self, other):
        """Those of two threads that do not wait for each other, each with a mesh of its own."""
        splits = (self.split, self.bound(other, None))
        with ThreadPoolExecutor(len(splits)) as pool:
            return list(pool.map(self.prefixes, splits))

    def shards_of(self, flat):
        """Each parameter's part and a copy of its values."""
        return {n: (self.parts[n], v.clone()) for n, v in views(flat, self.layout).items()}

    def train(self):
        """Log-probabilities of each case; its gradients are added to the accumulator."""
        return [
            split_backward(
                self.split,
                case,
                torch.linspace(-1, 1, sum(map(len, case.responses)), dtype=self.scenario.dtype),
                temperature=TEMPERATURE,
                checkpointing=self.scenario.checkpointing,
            )
            for case in self.scenario.cases
        ]

    def collectives(self):
        """How many a text-only prefix and its backward need."""
        case = self.scenario.cases[-1]
        with Collectives() as forward:
            prefix = self.split.prefix_kv(case.prompt, self.split.vision_embeddings(case.prompt))
        gradient = torch.ones(
            packed_shape(self.split.config, prefix.tokens, kv_heads=self.split.kv_heads),
            dtype=self.split.dtype,
        )
        with Collectives() as backward:
            prefix_backward(prefix, gradient)
        self.gradients.zero_()
        return [forward.count, backward.count]

    def update(self):
        """The gradients' norm; weights are changed."""
        size = self.layout.trainable_elements
        moments = torch.zeros((2, size), dtype=self.scenario.dtype)
        optimizer = FlatAdamW(
            self.weights[:size],
            moments,
            decay_elements=self.layout.decay_elements,
            version=0,
            config=ALGORITHM,
        )
        report = ready_gradients(
            self.gradients,
            tokens=TOKENS,
            max_norm=ALGORITHM.max_grad_norm,
            learning_rate=ALGORITHM.learning_rate,
            norm_of=GlobalNorm(self.layout, self.parts, meshes=[self.mesh]),
        )
        assert report.applied
        assert report.clipped
        optimizer.step(self.gradients, learning_rate=report.learning_rate)
        return report.gradient_norm

    def decode(self, *, greedy, top_k=0):
        """Tokens and log-probabilities of each group, from the engine."""
        cases = self.scenario.cases[: self.scenario.decoded_groups]
        engine = NativeEngine(self.split, max_slots=3 * len(cases))
        engine.begin_step(
            StepSpec(
                step=4,
                weights_version=4,
                seed=77,
                groups=tuple(range(len(cases))),
                samples_per_group=3,
                params=self.scenario.sampling(greedy=greedy, top_k=top_k),
            )
        )
        with torch.no_grad():
            for group, case in enumerate(cases):
                vision = self.split.vision_embeddings(case.prompt)
                engine.add_group(GroupRequest(group=group, prompt=case.prompt, vision=vision))
        done = {}
        while not engine.finished:
            while engine.admit_next() is not None:
                pass
            for group in engine.run_iteration().finished:
                done[group.group] = (group.tokens, group.lengths, group.logprobs)
        return done


def train(member, other, checkpoint):
    """One step; leaves a checkpoint of the whole model."""
    result = {
        "prefixes": member.prefixes(member.split),
        "beside": member.prefixes_beside_each_other(other),
        "collectives": member.collectives(),
        "logprobs": member.train(),
        "gradients": member.shards_of(member.gradients),
        "norm": member.update(),
        "weights": member.shards_of(member.weights),
    }
    save_shards(
        checkpoint,
        member.scenario.config,
        member.whole,
        member.shape,
        views(member.weights, member.layout),
        member.mesh,
        max_shard_bytes=20_000,
    )
    return result


def roll_out(member, checkpoint):
    """Decode and score with weights that another degree has trained."""
    tensors = views(member.weights, member.layout)
    load_checkpoint(checkpoint, member.layout, tensors, shards=member.parts)
    return {
        "greedy": member.decode(greedy=True),
        "sampled": member.decode(greedy=False),
        "logprobs": member.train(),
    }


def main(rank, rendezvous, folder):
    join(rank, rendezvous)
    own, others = meshes(), meshes()
    for number, scenario in enumerate(SCENARIOS.values()):
        members = {d: Rank(scenario, mesh) for d, mesh in own.items() if rank in RUNS[d]}
        for degree, member in members.items():
            result = train(member, others[degree], folder / f"model-{number}-{degree}")
            torch.save(result, folder / f"trained-{number}-{degree}-{member.rank}.pt")
        dist.barrier()
        for degree, member in members.items():
            result = roll_out(member, folder / f"model-{number}-{2 if degree == 4 else 4}")
            torch.save(result, folder / f"rolled-{number}-{degree}-{member.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
