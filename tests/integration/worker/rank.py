"""One rank that joins, agrees, leaves, and joins again; what it saw goes into a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from common.step.place import Place
from common.worker.ranks import Ranks

DEGREE = 2


def main(rank, folder):
    seen = []
    for attempt in range(2):
        rendezvous = folder / f"join-{attempt}"
        place = Place(rank=rank, degree=DEGREE)
        ranks = Ranks.join(
            rendezvous, place=place, device=torch.device("cpu"), collective_timeout_s=30.0
        )
        total = torch.tensor([rank + 1])
        dist.all_reduce(total, group=ranks.mesh.get_group())
        ranks.meet()
        configured = torch.tensor([rank + 1])
        waiting = dist.all_reduce(configured, async_op=True) if rank == 0 else None
        agree = [ranks.agree(True), ranks.agree(rank == 0)]
        if waiting is None:
            dist.all_reduce(configured)
        else:
            waiting.wait()
        seen.append(
            {
                "replicas": ranks.replicas is not None,
                "total": int(total),
                "agree": agree,
                "configured": int(configured),
                "all_true": [ranks.all_true(True), ranks.all_true(rank == 0)],
                "all_equal": [ranks.all_equal(-1), ranks.all_equal(rank)],
                "left_behind": rendezvous.exists(),
            }
        )
        ranks.leave()
        ranks.leave()
    (folder / f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[3]))
