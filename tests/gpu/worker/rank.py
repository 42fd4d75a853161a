"""One of two ranks, a GPU each: joins, sums, leaves; weights are pushed, a sum is aborted.

Arguments: rank, file of a rendezvous, folder for results. Saves what it saw.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from common.gpu.green_streams import GreenStreams
from common.step.place import Place
from common.vlm.parallel.group import RankGroup
from common.worker.device import WorkerDevice
from common.worker.push_link import PushBroken, PushLink
from common.worker.ranks import Ranks

WORLD = 2
TIMEOUT_S = 60.0
ELEMENTS = 1 << 20
SHARE_SMS = 24
BUCKET_BYTES = 1 << 19
CLOSED_AFTER_S = 1.0
ALONE_S = 8.0


def on_a_share(group, device, rank):
    """A sum on a stream of a few SMs."""
    stream = GreenStreams(device.index, [SHARE_SMS]).stream(SHARE_SMS)
    values = torch.full((ELEMENTS,), rank + 1.0, device=device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        group.sum(values)
        stream.synchronize()
    return values.unique().tolist()


def in_a_graph(group, device, rank):
    """A sum and a gather, captured and run once."""
    values = torch.ones(ELEMENTS, device=device)
    gathered = torch.zeros((WORLD, ELEMENTS), device=device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        group.sum(values)
        group.gather(values, gathered)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        group.sum(values)
        group.gather(values, gathered)
        graph.capture_end()
        values.fill_(rank + 1.0)
        graph.replay()
        side.synchronize()
    return gathered.unique().tolist()


def joined(rank, folder, attempt):
    """What ranks that join see, and how long they take to leave."""
    device = torch.device("cuda", rank)
    ranks = Ranks.join(
        folder / f"join-{attempt}",
        place=Place(rank=rank, degree=WORLD),
        device=device,
        collective_timeout_s=TIMEOUT_S,
    )
    group = RankGroup(ranks.mesh)
    seen = {
        "left_behind": (folder / f"join-{attempt}").exists(),
        "share": on_a_share(group, device, rank),
        "graph": in_a_graph(group, device, rank),
        "told": ranks.told(rank + 7),
        "agree": ranks.agree(rank == 0),
    }
    ranks.meet()
    start_s = time.monotonic()
    ranks.leave()
    return seen | {"leave_s": time.monotonic() - start_s}


async def pushed(rank, folder):
    """Weights from the first to the second, and the end of a wait for more by `close`."""
    device = torch.device("cuda", rank)
    enter = WorkerDevice(torch=device, uuid="").enter
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(initializer=enter))
    link = await asyncio.to_thread(
        PushLink.join,
        folder / "push",
        rank=rank,
        device=device,
        bucket_bytes=BUCKET_BYTES,
        timeout_s=TIMEOUT_S,
    )
    weights = torch.zeros(ELEMENTS, dtype=torch.bfloat16, device=device)
    if rank == 0:
        weights += torch.arange(ELEMENTS, device=device) % 128
        torch.cuda.synchronize(device)
    for bucket in link.buckets(ELEMENTS, weights.dtype):
        await (link.send if rank == 0 else link.receive)(weights[bucket])
    heard = await link.hear() if rank == 0 else await link.tell(5)
    waiting = asyncio.create_task(link.receive(torch.zeros_like(weights)))
    await asyncio.sleep(CLOSED_AFTER_S)
    start_s = time.monotonic()
    await asyncio.to_thread(link.close)
    try:
        await waiting
        broken = False
    except PushBroken:
        broken = True
    return {
        "right": bool((weights.cpu() == torch.arange(ELEMENTS) % 128).all()),
        "heard": heard,
        "broken": broken,
        "close_s": time.monotonic() - start_s,
    }


def aborted(rank, folder):
    """How long a sum goes on that the other rank has no part in, once it is aborted."""
    device = torch.device("cuda", rank)
    ranks = Ranks.join(
        folder / "aborted",
        place=Place(rank=rank, degree=WORLD),
        device=device,
        collective_timeout_s=TIMEOUT_S,
    )
    if rank == 1:
        time.sleep(ALONE_S)
        return None
    RankGroup(ranks.mesh).sum(torch.ones(ELEMENTS, device=device))
    time.sleep(CLOSED_AFTER_S)
    assert not torch.cuda.current_stream(device).query()
    start_s = time.monotonic()
    ranks.abort()
    torch.cuda.synchronize(device)
    return time.monotonic() - start_s


def main(rank, folder):
    seen = {"joined": [joined(rank, folder, attempt) for attempt in range(2)]}
    seen["pushed"] = asyncio.run(pushed(rank, folder))
    seen["aborted_s"] = aborted(rank, folder)
    seen["contexts"] = [torch._C._cuda_hasPrimaryContext(one) for one in range(WORLD)]
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[3]))
