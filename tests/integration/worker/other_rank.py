"""The second of two ranks, which joins and leaves once for each rendezvous."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from common.worker.ranks import TensorRanks


def main(rendezvous):
    for one in rendezvous:
        cpu = torch.device("cpu")
        TensorRanks.join(one, rank=1, degree=2, device=cpu, collective_timeout_s=30.0).leave()


if __name__ == "__main__":
    main([Path(one) for one in sys.argv[1:]])
