"""Two processes on one device: the weights of one become those of the other."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from bench.timing import measure
from bench.weights_ranks import BACKENDS
from common.weights.resharding.buffers import source_elements, sources_in
from common.weights.resharding.executor import Resharding
from common.worker.device import wait_for

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch import Tensor

    from bench.weights_case import Case

_ANSWER_S = 600.0
_WARM_UP = 1
_PUBLISH, _BUCKETS, _END = "publish", "buckets", "end"


def measure_handover(case: Case) -> dict[str, Any]:
    """Both ways, degree 1 to degree 1; this process trains, another one rolls out."""
    device = torch.device(case.device)
    (gpu,) = case.plan().gpus
    weights = torch.randn(source_elements(gpu), device=device).to(case.dtype)
    elements = min(case.bucket_bytes // case.dtype.itemsize, len(weights))
    bucket = torch.empty(elements, dtype=case.dtype, device=device)
    if case.device == "cpu":
        weights.share_memory_()
        bucket.share_memory_()
    spawn = multiprocessing.get_context("spawn")
    end, theirs = spawn.Pipe()
    process = spawn.Process(target=_consume, args=(case, theirs))
    process.start()
    theirs.close()
    try:
        end.send((weights, bucket))
        _train(weights, bucket, end)
        found: dict[str, Any] = _received(end)
    finally:
        end.close()
        process.join(timeout=30)
        if process.is_alive():
            process.kill()
            process.join()
    return found


def _train(weights: Tensor, bucket: Tensor, end: Connection) -> None:
    """Serve the consumer's wishes until it has no more."""
    while (wish := _received(end)) != _END:
        if wish == _BUCKETS:
            for part in weights.split(len(bucket)):
                bucket[: len(part)].copy_(part)
                wait_for(weights.device)
                end.send(len(part))
                _received(end)
        end.send(0)


def _consume(case: Case, end: Connection) -> None:
    torch.set_num_threads(1)
    device = torch.device(case.device)
    dist.init_process_group(BACKENDS[case.device], store=dist.HashStore(), rank=0, world_size=1)
    weights, bucket = _received(end)
    plan = case.plan()
    group = dist.group.WORLD
    assert group is not None
    resharding = Resharding(plan, sources_in(plan.gpus[0], weights), group)
    copy = torch.empty_like(weights)

    def by_plan() -> None:
        end.send(_PUBLISH)
        _received(end)
        resharding.update()

    def full_copy() -> None:
        end.send(_BUCKETS)
        start = 0
        while size := _received(end):
            copy[start : start + size].copy_(bucket[:size])
            wait_for(device)
            start += size
            end.send(_PUBLISH)

    by_plan_timing, full_timing = (
        measure(lambda _, way=way: way(), device=device, repeats=case.repeats, warm_up=_WARM_UP)
        for way in (by_plan, full_copy)
    )
    assert torch.equal(copy, weights), "the copy is another one"
    refresh = resharding.update()
    end.send(_END)
    end.send(
        {
            "by_plan": {
                **asdict(by_plan_timing),
                "alias_bytes": refresh.alias_bytes,
                "gather_bytes": refresh.gather_bytes,
                "rebuild_bytes": refresh.rebuild_bytes,
                "extra_bytes": plan.gpus[0].extra_bytes,
            },
            "full_copy": {
                **asdict(full_timing),
                "copied_bytes": 2 * weights.nbytes,
                "extra_bytes": copy.nbytes + bucket.nbytes,
            },
        }
    )
    dist.destroy_process_group()


def _received(end: Connection) -> Any:
    if not end.poll(_ANSWER_S):
        raise TimeoutError("the other process does not answer")
    return end.recv()
