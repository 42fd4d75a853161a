"""Process groups of tensor parallelism, one for each stream of work that runs beside another."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from common.vlm.errors import DegreeInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_TIMEOUT_S = 600.0


def tensor_mesh(
    groups: Sequence[Sequence[int]], *, device_type: str, timeout_s: float = DEFAULT_TIMEOUT_S
) -> DeviceMesh:
    """This process's mesh of one dimension, with a communicator of its own.

    Collectives of one communicator have to be issued in the same order on all its ranks, so two
    streams of work that do not wait for each other need a mesh each. All processes of the default
    process group have to call this with the same groups, and in the same order if several times.

    Args:
        groups: of global ranks, every rank in one of them. A group's shards follow the order of
            its ranks' numbers, however they are listed.
        device_type: ``cuda`` or ``cpu``.
        timeout_s: after which a collective that lacks a rank fails.
    Raises: DegreeInvalid if the groups do not name every rank once.
    """
    world = dist.get_world_size()
    if sorted(rank for ranks in groups for rank in ranks) != list(range(world)):
        raise DegreeInvalid(
            f"tensor-parallel groups {[list(ranks) for ranks in groups]}: must name each of the "
            f"ranks 0 to {world - 1} once"
        )
    timeout = timedelta(seconds=timeout_s)
    made = [dist.new_group(list(ranks), timeout=timeout) for ranks in groups]
    own = next(at for at, ranks in enumerate(groups) if dist.get_rank() in ranks)
    # Meshes of equal ranks and names are equal, and DTensor caches by equality: under one name, one
    # mesh's operations would come to use the other's communicator.
    name = f"tensor_{made[own].group_name}"
    return DeviceMesh.from_group(made[own], device_type, mesh_dim_names=(name,))
