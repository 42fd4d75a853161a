"""One rank on fused steps: runs every scenario at every degree and saves what came out.

Arguments: rank, file of the rendezvous, folder for results. Triton's interpreter is in place of a
GPU.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from common.vlm.cuda.decode_parts import Cuts
from common.vlm.cuda.fused import FusedSteps
from common.vlm.loading import empty_model
from common.vlm.model import SplitModel
from common.vlm.parallel import model as parallel
from common.vlm.parallel.local import hold_own_parts
from common.weights.binding import bind_parameters
from services.rollout.engines import device
from tests.integration.parallel.rank import Rank
from tests.integration.parallel.scenarios import FUSED
from tests.integration.parallel.world import RUNS, join, meshes
from tests.unit.vlm.cuda.segments import SegmentBlocks


class FusedRank(Rank):
    """A model of the rank's own parts as plain tensors, and the steps that sum over ranks."""

    def bound(self, mesh, gradients):
        model = empty_model(self.scenario.config, dtype=self.scenario.dtype)
        ranks = hold_own_parts(model, self.shape, mesh) if mesh.size() > 1 else None
        blocks = SegmentBlocks(group=None if ranks is None else ranks.vision)
        split = SplitModel(model, steps=FusedSteps(vision=blocks, ranks=ranks))
        bind_parameters(model, self.layout, self.weights, gradients)
        return split

    def results(self):
        """All passes with one set of weights."""
        return {
            "prefixes": self.prefixes(self.split),
            "collectives": self.collectives(),
            "logprobs": self.train(),
            "gradients": self.shards_of(self.gradients),
            "greedy": self.decode(greedy=True),
            "sampled": self.decode(greedy=False),
            "truncated": self.decode(greedy=False, top_k=5),
        }


def chosen(scenario, mesh, kernels):
    """Number of ranks that the passes sum over by themselves, where fused kernels fit; None: no."""
    model = empty_model(scenario.config, dtype=scenario.dtype)
    parallel.fused_kernels = lambda kernels, **_: kernels == "auto"
    split = parallel.parallel_model(model, mesh, kernels=kernels)
    return split.group.size if split.group and split.fused else None


def few_programs():
    """Cut decode steps into few programs, because the interpreter runs one after the other."""
    device._SMALL_BUCKETS = ()
    cuts = replace(Cuts.of(rows=16), items=3, early=False)
    Cuts.of = staticmethod(lambda **_: cuts)


def main(rank, rendezvous, folder):
    few_programs()
    join(rank, rendezvous)
    for degree, mesh in meshes().items():
        if rank in RUNS[degree]:
            for number, scenario in enumerate(FUSED.values()):
                result = FusedRank(scenario, mesh).results()
                result["chosen"] = [chosen(scenario, mesh, k) for k in ("auto", "plain")]
                torch.save(result, folder / f"fused-{number}-{degree}-{mesh.get_local_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
