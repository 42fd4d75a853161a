"""One rank of several replicas: what it gets of gradients and weights goes into a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from common.step.place import Place
from common.vlm.parallel.state import GlobalNorm
from common.weights.layout import TensorSpec, WeightLayout
from common.worker.ranks import Ranks
from services.learner.replicas import Replicas

SIZES = (16, 48, 128)
"""With and without a rest, whatever number of replicas."""


def layout_of(elements):
    """Two tensors, the second of which lies in several shares."""
    specs = [
        TensorSpec(name="first", shape=(5,), trainable=True, decay=True),
        TensorSpec(name="second", shape=(elements - 16,), trainable=True, decay=False),
    ]
    return WeightLayout.build(
        specs if elements > 16 else specs[:1], dtype="float32", rank=0, world=1
    )


def main(rank, folder, degree, replicas):
    place = Place(rank=rank, degree=degree, replicas=replicas)
    ranks = Ranks.join(
        folder / "join", place=place, device=torch.device("cpu"), collective_timeout_s=30.0
    )
    ranks.meet()
    seen = {
        "tensor": None if ranks.mesh is None else ranks.mesh.get_local_rank(),
        "replica": ranks.replicas.get_local_rank(),
        "all_true": [ranks.all_true(True), ranks.all_true(rank == 0)],
        # Rank 0 is in the first replica.
        "agree": [ranks.agree(True), ranks.agree(rank != 0)],
        "everyones": ranks.everyones([rank, rank / 4]),
    }
    for size in SIZES:
        shared = Replicas(size, ranks.replicas)
        gradients = (torch.arange(size) + 1.0) * (rank + 1)
        summed = shared.reduce(gradients)
        norm = GlobalNorm(layout_of(size), None, meshes=[ranks.replicas], elements=shared.own)
        weights = torch.full((size + 3,), -1.0).bfloat16()
        weights[:size][shared.own] = float(place.replica)
        shared.gather(weights[:size])
        seen[str(size)] = {
            "own": [shared.own.start, shared.own.stop],
            "summed": summed.tolist(),
            "in_place": summed.data_ptr() == gradients[shared.own].data_ptr(),
            "norm": norm(summed),
            "gathered": weights.tolist(),
        }
    ranks.leave()
    (folder / f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[3]), *map(int, sys.argv[4:]))
