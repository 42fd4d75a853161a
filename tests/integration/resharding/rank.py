"""One of four processes: carries out every case, writes down what went wrong."""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.integration.resharding.cases import CASES, WORLD
from tests.unit.weights.models import Member, two_updates, whole_tensors

TIMEOUT_S = 120.0


def carry_out(case):
    plan = case.plan
    wholes = [whole_tensors(plan.train, case.dtype, seed) for seed in (1, 2)]
    member = Member(plan, dist.group.WORLD, case.dtype, round_bytes=case.round_bytes)
    return asdict(two_updates(member, wholes))


def main(rank, rendezvous, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    for number, case in enumerate(CASES):
        try:
            result = carry_out(case)
        except Exception:  # noqa: BLE001 - the test shows it
            result = {"error": traceback.format_exc()}
        (folder / f"{number}-{rank}.json").write_text(json.dumps(result))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
