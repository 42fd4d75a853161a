"""The world of the ranks: its groups of each degree, and how a rank becomes a member."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from common.vlm.parallel.mesh import tensor_mesh

DEGREES = (1, 2, 4)
WORLD = 4
GROUPS = {1: ((0,), (1,), (2,), (3,)), 2: ((0, 1), (2, 3)), 4: ((0, 1, 2, 3),)}
RUNS = {1: (0,), 2: (2, 3), 4: (0, 1, 2, 3)}
"""Which ranks run a degree: rank 0 has the model to itself beside a group of two."""
TIMEOUT_S = 200.0


def join(rank, rendezvous):
    """Become a member."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=TIMEOUT_S),
    )


def meshes():
    """This rank's mesh of each degree."""
    return {
        degree: tensor_mesh(groups, device_type="cpu", timeout_s=TIMEOUT_S)
        for degree, groups in GROUPS.items()
    }
