"""Ranks of the rollout on one device, a process each, and training's ranks in this process."""

from __future__ import annotations

from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import multiprocessing

from bench.timing import measure
from bench.weights_ranks import together
from bench.weights_values import fill_sources
from common.ids import WeightsVersion
from common.layouts.node import rollout_sharing, source_ranks, training_sharing
from common.weights.resharding.buffers import (
    own_elements,
    own_in,
    source_elements,
    sources_in,
    target_tensors,
)
from common.weights.resharding.direct import DirectResharding
from common.worker.device import wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from multiprocessing.connection import Connection

    from torch import Tensor

    from bench.weights_case import Case
    from common.layouts.plan import GpuSharing, SharingPlan

_ANSWER_S = 120.0
_WARM_UP = 1
_PUBLISH, _BUCKETS, _END = "publish", "buckets", "end"
_VERSION = WeightsVersion(1)


def measure_handover(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Both ways of each case.

    Returns: for each case and way milliseconds of the slowest rank and bytes of all ranks.
    """
    spawn = multiprocessing.get_context("spawn")
    ends, processes = [], []
    try:
        for rank in range(max(case.degrees[1] for case in cases)):
            end, theirs = spawn.Pipe()
            own = [case for case in cases if rank < case.degrees[1]]
            process = spawn.Process(target=_consume, args=(own, rank, theirs))
            process.start()
            theirs.close()
            ends.append(end)
            processes.append(process)
        return [_hand_over(case, ends[: case.degrees[1]]) for case in cases]
    finally:
        for end in ends:
            end.close()
        for process in processes:
            process.join(timeout=30)
            if process.is_alive():
                process.kill()
                process.join()


def _hand_over(case: Case, ends: Sequence[Connection]) -> dict[str, Any]:
    device, plan = torch.device(case.device), case.plan_on_one_device()
    flats = [
        torch.zeros(source_elements(training_sharing(plan, rank)), dtype=case.dtype, device=device)
        for rank in range(case.degrees[0])
    ]
    sources = _sources(plan, flats)
    for tensors, of_rank in zip(plan.train.ranks, sources.values(), strict=True):
        fill_sources(tensors, of_rank)
    copies = _packed(case, sources)
    most = case.bucket_bytes // case.dtype.itemsize
    buckets = [one.new_zeros(min(most, len(one))) for one in copies]
    if case.device == "cpu":
        for tensor in (*flats, *buckets):
            tensor.share_memory_()
    wait_for(device)
    for end, bucket in zip(ends, buckets, strict=True):
        end.send((flats, bucket))
    _serve(copies, buckets, ends)
    found: list[dict[str, Any]] = [_received(end) for end in ends]
    return {
        "train_tp": case.degrees[0],
        "rollout_tp": case.degrees[1],
        **{way: together([one[way] for one in found]) for way in found[0]},
    }


def _sources(plan: SharingPlan, flats: Sequence[Tensor]) -> dict[int, dict[str, Tensor]]:
    return {rank: sources_in(training_sharing(plan, rank), flat) for rank, flat in enumerate(flats)}


def _packed(case: Case, shared: Mapping[int, Mapping[str, Tensor]]) -> list[Tensor]:
    """What each rank of the rollout has in all: so buckets are filled by one plain copy each."""
    apart = case.plan_on_one_device(shared=False)
    like = next(iter(shared[0].values()))
    flats = [like.new_zeros(source_elements(training_sharing(apart, rank))) for rank in shared]
    sources = _sources(apart, flats)
    for rank, tensors in sources.items():
        for name, tensor in tensors.items():
            tensor.copy_(shared[rank][name].reshape(tensor.shape))
    copies = []
    for rank in range(case.degrees[1]):
        sharing = rollout_sharing(apart, rank)
        own = like.new_zeros(own_elements(sharing))
        read = {one: sources[one] for one in source_ranks(sharing)}
        DirectResharding(apart, sharing, read, own).update(_VERSION)
        copies.append(own)
    return copies


def _serve(copies: Sequence[Tensor], buckets: Sequence[Tensor], ends: Sequence[Connection]) -> None:
    """Do what all ranks wish at a time, until they have no more wishes."""
    while (wish := _wish(ends)) != _END:
        if wish == _BUCKETS:
            split = (one.split(len(bucket)) for one, bucket in zip(copies, buckets, strict=True))
            for parts in zip_longest(*split):
                _send_parts(parts, buckets, ends)
        for end in ends:
            end.send(0)


def _send_parts(
    parts: Sequence[Tensor | None], buckets: Sequence[Tensor], ends: Sequence[Connection]
) -> None:
    waiting = []
    for part, bucket, end in zip(parts, buckets, ends, strict=True):
        if part is not None:
            bucket[: len(part)].copy_(part)
            waiting.append((end, len(part)))
    wait_for(buckets[0].device)
    for end, size in waiting:
        end.send(size)
    for end, _ in waiting:
        _received(end)


def _wish(ends: Sequence[Connection]) -> str:
    (wish,) = {_received(end) for end in ends}
    return str(wish)


def _consume(cases: Sequence[Case], rank: int, end: Connection) -> None:
    torch.set_num_threads(1)
    with end:
        for case in cases:
            end.send(_timed(case, rank, end))


def _timed(case: Case, rank: int, end: Connection) -> dict[str, dict[str, Any]]:
    flats, bucket = _received(end)
    device, plan = torch.device(case.device), case.plan_on_one_device()
    sharing = rollout_sharing(plan, rank)
    sources = _sources(plan, flats)
    own = bucket.new_zeros(own_elements(sharing))
    read = {one: sources[one] for one in source_ranks(sharing)}
    resharding = DirectResharding(plan, sharing, read, own)
    apart = rollout_sharing(case.plan_on_one_device(shared=False), rank)
    copy = bucket.new_zeros(own_elements(apart))

    def by_plan() -> None:
        end.send(_PUBLISH)
        _received(end)
        resharding.update(_VERSION)

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
    refresh = resharding.update(_VERSION)
    for name, tensor in target_tensors(apart, own_in(apart, copy)).items():
        same = torch.equal(resharding.targets[name].reshape(tensor.shape), tensor)
        assert same, f"{name}: the copy is another one"
    end.send(_END)
    return {
        "by_plan": {
            **asdict(by_plan_timing),
            "alias_bytes": refresh.alias_bytes,
            "gather_bytes": refresh.gather_bytes,
            "rebuild_bytes": refresh.rebuild_bytes,
            "extra_bytes": sharing.extra_bytes,
        },
        "full_copy": {
            **asdict(full_timing),
            "alias_bytes": 0,
            "gather_bytes": 0,
            "rebuild_bytes": _moved_bytes(apart),
            "extra_bytes": copy.nbytes + bucket.nbytes,
        },
    }


def _moved_bytes(sharing: GpuSharing) -> int:
    """Without padding."""
    return sharing.element_bytes * sum(
        one.moved_elements * one.tensor.count
        for cluster in sharing.clusters
        for one in cluster.rollout
    )


def _received(end: Connection) -> Any:
    if not end.poll(_ANSWER_S):
        raise TimeoutError("the other process does not answer")
    return end.recv()
