"""Updates over tensor-parallel ranks, a process each."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from bench.timing import measure
from common.weights.resharding.buffers import allocate_sources
from common.weights.resharding.executor import ROUND_BYTES, Resharding

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from bench.weights_case import Case

_WARM_UP = 1
_ANSWER_S = 3600.0
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def measure_ranks(cases: Sequence[Case], ranks: int) -> list[dict[str, Any]]:
    """Both ways of each case, by as many processes as its plan has GPUs.

    Returns: for each case and way milliseconds of the slowest rank and bytes of all ranks.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="rollplex-bench-") as folder:
        ends, processes = [], []
        for rank in range(ranks):
            mine, theirs = spawn.Pipe()
            arguments = (cases, rank, ranks, Path(folder) / "rendezvous", theirs)
            process = spawn.Process(target=_rank, args=arguments)
            process.start()
            theirs.close()
            ends.append(mine)
            processes.append(process)
        try:
            found = [_answer(end) for end in ends]
        finally:
            for process in processes:
                process.join(timeout=30)
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()
    return [
        {
            "train_tp": case.degrees[0],
            "rollout_tp": case.degrees[1],
            "ranks": ranks,
            **{way: together([one[way] for one in of_ranks]) for way in of_ranks[0]},
        }
        for case, of_ranks in zip(cases, zip(*found, strict=True), strict=True)
    ]


def _answer(end: Connection) -> list[dict[str, dict[str, Any]]]:
    with end:
        if not end.poll(_ANSWER_S):
            raise TimeoutError("a rank does not answer")
        found: list[dict[str, dict[str, Any]]] = end.recv()
    return found


def together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The times of the slowest rank, and bytes of all."""
    slowest = max(found, key=lambda one: float(one["median_ms"]))
    sums = ("alias_bytes", "gather_bytes", "rebuild_bytes", "extra_bytes")
    return {**slowest, **{key: sum(int(one[key]) for one in found) for key in sums}}


def _rank(
    cases: Sequence[Case], rank: int, ranks: int, rendezvous: Path, answer: Connection
) -> None:
    torch.set_num_threads(1)
    kind = cases[0].device
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        BACKENDS[kind], init_method=f"file://{rendezvous}", rank=rank, world_size=ranks
    )
    group = dist.group.WORLD
    assert group is not None
    with answer:
        answer.send(
            [
                {
                    "by_plan": _timed(case, group, device, shared=True),
                    "full_copy": _timed(case, group, device, shared=False),
                }
                for case in cases
            ]
        )
    dist.barrier()
    dist.destroy_process_group()


def _timed(
    case: Case, group: dist.ProcessGroup, device: torch.device, *, shared: bool
) -> dict[str, Any]:
    plan = case.plan(shared=shared)
    gpu = plan.gpus[group.rank()]
    sources = allocate_sources(gpu, dtype=case.dtype, device=device)
    round_bytes = ROUND_BYTES if shared else case.bucket_bytes
    resharding = Resharding(plan, sources, group, round_bytes=round_bytes)
    timing = measure(
        lambda _: resharding.update(),
        device=device,
        prepare=lambda: dist.barrier(group),
        repeats=case.repeats,
        warm_up=_WARM_UP,
    )
    refresh = resharding.update()
    return {
        **asdict(timing),
        "alias_bytes": refresh.alias_bytes,
        "gather_bytes": refresh.gather_bytes,
        "rebuild_bytes": refresh.rebuild_bytes,
        "extra_bytes": gpu.extra_bytes,
        "collectives": refresh.collectives,
    }
