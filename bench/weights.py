"""Updates of the rollout's weights: by plan, and as a full second copy in buckets.

`python -m bench.weights --model qwen2.5-vl-3b --layers 4` starts processes on this machine. For
each pair of tensor-parallel degrees it times an update by the plan of `rollplex layout`, and one
that brings every rank its whole shard, and nothing else, in buckets of 2 GiB. On CUDA that needs a
GPU a rank, and is left out where there are fewer. Then, for degree 1 and the same pairs, training's
process hands a model over to a process of each of the rollout's ranks on one device: by plan on
memory that all have mapped (CUDA IPC, or shared memory), and as a copy through a shared bucket a
rank, which moves all of it twice and counts it once. Prints one JSON object: milliseconds of the
slowest rank, and bytes that all ranks together have moved.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from bench.conditions import conditions
from bench.weights_case import Case
from bench.weights_handover import measure_handover
from bench.weights_ranks import measure_ranks
from common.layouts.kinds import ROLLOUT_LAYOUTS, TRAIN_LAYOUTS
from common.layouts.model import legal_degrees
from common.vlm.shape import read_shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.vlm.shape import ModelShape


def main() -> int:
    """Measure everything, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-vl-3b", help="name, or folder with config.json")
    parser.add_argument("--layers", type=int, help="of text model and tower; default: all")
    parser.add_argument("--train-layout", choices=TRAIN_LAYOUTS, default=TRAIN_LAYOUTS[0])
    parser.add_argument("--rollout-layout", choices=ROLLOUT_LAYOUTS, default=ROLLOUT_LAYOUTS[1])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--processes", default="2,4", help="numbers of ranks; empty: none beside degree 1"
    )
    parser.add_argument("--bucket-mib", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    shape = _cut(read_shape(arguments.model), arguments.layers)
    layouts = (arguments.train_layout, arguments.rollout_layout)
    case = Case(
        shape=shape,
        layouts=layouts,
        degrees=(1, 1),
        dtype=getattr(torch, arguments.dtype),
        device=arguments.device,
        bucket_bytes=arguments.bucket_mib << 20,
        repeats=arguments.repeats,
    )
    sizes = [int(size) for size in arguments.processes.split(",") if size]
    room = torch.cuda.device_count() if arguments.device == "cuda" else max(sizes, default=0)
    pairs = {size: list(_degrees(shape, size)) for size in sizes}
    on_one = dict.fromkeys([(1, 1), *(pair for size in sizes for pair in pairs[size])])
    found: dict[str, Any] = {
        "benchmark": "weights",
        "model": arguments.model,
        "layers": shape.layers,
        "layouts": layouts,
        "dtype": arguments.dtype,
        "device": arguments.device,
        "bucket_bytes": case.bucket_bytes,
        "repeats": arguments.repeats,
        "ranks": [
            one
            for size in sizes
            if size <= room
            for one in measure_ranks([replace(case, degrees=pair) for pair in pairs[size]], size)
        ],
        "handover": measure_handover([replace(case, degrees=pair) for pair in on_one]),
        **conditions(arguments.device, ("torch",)),
    }
    print(json.dumps(found, indent=2))
    return 0


def _cut(shape: ModelShape, layers: int | None) -> ModelShape:
    if layers is None:
        return shape
    return replace(shape, layers=layers, vision=replace(shape.vision, depth=layers))


def _degrees(shape: ModelShape, ranks: int) -> Iterator[tuple[int, int]]:
    """Pairs that need so many ranks: narrower, equal and wider rollouts."""
    legal = legal_degrees(shape)
    for pair in dict.fromkeys(((1, ranks), (ranks // 2, ranks), (ranks, ranks), (ranks, 1))):
        if all(degree in legal for degree in pair):
            yield pair


if __name__ == "__main__":
    sys.exit(main())
