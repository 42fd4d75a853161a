"""The second of two ranks, which joins and leaves once for each rendezvous."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from common.step.place import Place
from common.worker.ranks import Ranks


def main(rendezvous):
    for one in rendezvous:
        Ranks.join(
            one,
            place=Place(rank=1, degree=2),
            device=torch.device("cpu"),
            collective_timeout_s=30.0,
        ).leave()


if __name__ == "__main__":
    main([Path(one) for one in sys.argv[1:]])
