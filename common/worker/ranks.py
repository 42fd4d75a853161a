"""The ranks of a service that have collectives with each other, as one of its processes sees them.

These are the tensor-parallel ranks of a replica, and, where the service's replicas meet, those of
all replicas.

Invariants:
- All ranks issue the same collectives in the same order. Those of `mesh` and `replicas`, with
  `meet`, `agree`, `told` and `everyones`, come from the compute thread, or from a checkpoint, which
  there is between two epochs only. `all_true` and `all_equal` have a communicator of their own and
  come while a run is configured; so do the others then, where no compute thread is busy.
- A configuration joins anew, whatever became of the ranks before it. A rank that waits in a
  collective for one that has ended an epoch does not come back, and ends its process.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from common.config.environment import set_collectives
from common.errors import ProcessUnusable, Unavailable
from common.vlm.parallel.mesh import tensor_mesh

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from common.step.place import Place

PRESENT_TIMEOUT_S = 30.0
"""Longest wait for the other ranks to be configured too."""
AGREE_TIMEOUT_S = 120.0
"""Longest wait for the other ranks once all have come, such as for a checkpoint to be read."""
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""By the device that ranks compute on. What they agree on is in the host's memory."""
LOOK_EVERY_S = 0.05
"""Between two looks at which ranks have come."""
PARTED_AFTER_S = 5.0
"""Longest time that a job goes on after its epoch has ended, a checkpoint after another rank has
come to be configured, or a join after a newer configuration, before it counts as one that waits for
ranks that have left it."""


class RanksParted(ProcessUnusable):
    """A collective of an ended epoch, or a join, goes on: nothing but the process ends it."""


class RanksAbsent(Unavailable):
    """Not every rank was configured in time."""


@asynccontextmanager
async def present(rendezvous: Path, *, rank: int, degree: int) -> AsyncIterator[None]:
    """Wait until every rank does the same, so that `Ranks.join` does not block for long.

    Args: rendezvous: as for `Ranks.join`, which belongs inside the block: no rank may leave it
        before all have come. Each has a file of its own meanwhile, beside that one.
        rank, degree: this one, of so many that join.
    Raises: RanksAbsent.
    """
    marks = _marks(rendezvous, degree)
    marks[rank].touch()
    try:
        give_up_s = time.monotonic() + PRESENT_TIMEOUT_S
        while absent := [one for one, mark in enumerate(marks) if not mark.exists()]:
            if time.monotonic() > give_up_s:
                raise RanksAbsent(f"{rendezvous.name}: ranks {absent} have not come")
            await asyncio.sleep(LOOK_EVERY_S)
        yield
    finally:
        marks[rank].unlink(missing_ok=True)


def others_present(rendezvous: Path, *, rank: int, degree: int) -> bool:
    """Whether a rank other than this one is inside `present`."""
    return any(mark.exists() for one, mark in enumerate(_marks(rendezvous, degree)) if one != rank)


def _marks(rendezvous: Path, degree: int) -> list[Path]:
    return [rendezvous.with_name(f"{rendezvous.name}.{one}") for one in range(degree)]


class Ranks:
    """Joined ranks; valid until `leave`.

    Attributes:
        mesh: of the tensor-parallel ranks of this replica, with a communicator of its own; None:
            there is one.
        replicas: of the ranks with the same part of the model, one a replica, likewise; None: no
            other replica has joined.
    """

    def __init__(self, mesh: DeviceMesh | None, replicas: DeviceMesh | None) -> None:
        self.mesh = mesh
        self.replicas = replicas

    @classmethod
    def join(
        cls,
        rendezvous: Path,
        *,
        place: Place,
        device: torch.device,
        collective_timeout_s: float,
    ) -> Ranks:
        """Wait for the other ranks, which do the same; blocks.

        Args:
            rendezvous: a file that no earlier call has used, the same for all ranks; removed.
            place: of this rank among all that join.
            device: that this rank computes on; of a GPU each rank has another one.
            collective_timeout_s: longest wait of a collective of `mesh` and `replicas`.
        Raises: RuntimeError (`torch.distributed.DistError`) if one does not come in time.
        """
        set_collectives()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        everyone = range(place.world)
        groups = [everyone[first:][: place.degree] for first in everyone[:: place.degree]]
        across = [everyone[first :: place.degree] for first in everyone[: place.degree]]
        try:
            dist.init_process_group(
                _BACKENDS[device.type],
                init_method=f"file://{rendezvous}",
                rank=place.rank,
                world_size=place.world,
                timeout=timedelta(seconds=AGREE_TIMEOUT_S),
            )
            mesh = _mesh(groups, device, timeout_s=collective_timeout_s)
            replicas = _mesh(across, device, timeout_s=collective_timeout_s)
            for made in (mesh, replicas):
                if made is not None:
                    _connect(made, device)
            dist.barrier()
        except BaseException:
            if dist.is_initialized():
                dist.destroy_process_group()
            # groups are named by their number: a process that has just started counts from 0
            dist.distributed_c10d._world.group_count = 0
            raise
        finally:
            rendezvous.unlink(missing_ok=True)
        return cls(mesh, replicas)

    def all_true(self, value: bool) -> bool:
        """Whether it is true on every rank; blocks until all have asked, as they are configured."""
        return _extremes(int(value), None)[0] == 1

    def all_equal(self, number: int) -> bool:
        """Whether all ranks have this number; otherwise as `all_true`."""
        lowest, highest = _extremes(number, None)
        return lowest == highest

    def agree(self, value: bool) -> bool:
        """Whether it is true on every rank of the replica; blocks until all have asked."""
        return value if self.mesh is None else _extremes(int(value), self.mesh.get_group())[0] == 1

    def told(self, number: int) -> int:
        """The number of the replica's first rank; blocks until it has said it."""
        if self.mesh is None:
            return number
        said = torch.tensor([number], dtype=torch.int64)
        dist.broadcast(said, group=self.mesh.get_group(), group_src=0)
        return int(said)

    def everyones(self, numbers: Sequence[float]) -> list[list[float]]:
        """As many numbers of each rank, of all replicas, in the order of the ranks' numbers.

        Blocks until all have asked.
        """
        rows = torch.tensor([numbers], dtype=torch.float64)
        for mesh in (self.mesh, self.replicas):
            if mesh is not None:
                parts = [torch.empty_like(rows) for _ in range(mesh.size())]
                dist.all_gather(parts, rows, group=mesh.get_group())
                rows = torch.cat(parts)
        return rows.tolist()

    def meet(self) -> None:
        """Block until all ranks of all replicas have come here."""
        # Behind the first, the whole replica has come; behind the second, all replicas have.
        for mesh in (self.mesh, self.replicas):
            if mesh is not None:
                dist.barrier(group=mesh.get_group())

    def abort(self) -> None:
        """End NCCL's kernels that wait for other ranks; for a process that ends after that.

        Any thread. Blocks for as long as there are graphs with collectives in them.
        """
        for mesh in (self.mesh, self.replicas):
            if mesh is not None and mesh.device_type == "cuda":
                mesh.get_group()._get_backend(torch.device("cuda")).abort()

    def leave(self) -> None:
        """Give the communicators up. Idempotent."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _mesh(groups: list[range], device: torch.device, *, timeout_s: float) -> DeviceMesh | None:
    if len(groups[0]) == 1:
        return None
    return tensor_mesh(groups, device_type=device.type, timeout_s=timeout_s)


def _connect(mesh: DeviceMesh, device: torch.device) -> None:
    """Sum something: NCCL's ranks find each other then, by the rendezvous, which is removed."""
    group = mesh.get_group()
    work = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
    assert work is not None, "only a process outside the group has nothing to wait for"
    work.wait(timedelta(seconds=AGREE_TIMEOUT_S))


def _extremes(number: int, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The lowest and the highest of all ranks' numbers. None: the group of the configuration."""
    pair = torch.tensor([number, -number], dtype=torch.int64)
    dist.all_reduce(pair, op=dist.ReduceOp.MIN, group=group)
    lowest, highest = pair.tolist()
    return lowest, -highest
