"""Speed of a decode step: its kernels, and whole steps, plain and fused.

`python -m bench.decode --shape 3b --device cuda --json out.json`; `--shape tiny --device cpu`
runs the plain step anywhere, and the fused one under Triton's interpreter. The kernels' cuts are
swept first, and the fastest of each are also measured together. With `--sms` the sweep is on so
many multiprocessors, as beside other work; whole steps are on all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.decode_kernels import Sweep
from bench.shapes import RandomModel, random_model, workload
from bench.timing import Report, ceilings, facts, measure, measure_many
from common.vlm import decode, layers
from common.vlm.decode_pool import DecodePool
from common.vlm.loading import head_dim, text_config
from common.vlm.model import SplitModel
from common.vlm.prefix import PrefixKV, packed_shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from transformers import Qwen2_5_VLConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences of one step.

    Attributes:
        groups, samples: of them.
        prefix_tokens: P.
        private_tokens: that each has generated.
        room: most that each may generate.
    """

    groups: int
    samples: int
    prefix_tokens: int
    private_tokens: int
    room: int

    @property
    def rows(self) -> int:
        """R."""
        return self.groups * self.samples

    def step_bytes(self, made: RandomModel, config: Qwen2_5_VLConfig) -> int:
        """Bytes that a step must read: weights once, each prefix once, private K/V."""
        text = text_config(config)
        language = made.model.model.language_model
        weights = sum(p.numel() for p in language.layers.parameters())
        weights += made.model.lm_head.weight.numel()
        token = 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim(config)
        kept = self.groups * self.prefix_tokens + self.rows * self.private_tokens
        return (weights + kept * token) * made.weights.element_size()


def pool_of(made: RandomModel, batch: Batch, device: torch.device) -> DecodePool:
    """A pool full of random keys and values."""
    config, dtype = made.model.config, made.weights.dtype
    pool = DecodePool(
        config,
        groups=batch.groups,
        samples=batch.samples,
        prefix_tokens=batch.prefix_tokens,
        response_tokens=batch.room,
        dtype=dtype,
        device=device,
    )
    packed = torch.randn(packed_shape(config, batch.prefix_tokens), device=device).to(dtype)
    for _ in range(batch.groups):
        pool.admit(PrefixKV.unpack(packed), last_token=9, start_position=batch.prefix_tokens)
    pool.private.normal_()
    return pool


def plain_step(made: RandomModel, batch: Batch, device: torch.device) -> Callable[[], Any]:
    """The plain decode path with index tensors made beforehand, so that a graph can hold it."""
    model, pool = SplitModel(made.model), pool_of(made, batch, device)
    slots = [slot for slot in range(batch.groups) for _ in range(batch.samples)]
    lanes = list(range(batch.samples)) * batch.groups
    step = decode._step(pool, slots, lanes, [batch.private_tokens] * batch.rows)
    tokens = torch.full((batch.rows,), 9, device=device)
    positions = torch.full((3, batch.rows), batch.prefix_tokens + 5, device=device)

    def run() -> Tensor:
        hidden = model.language.embed_tokens(tokens)
        angles = layers.rotary(model.language, hidden, positions)
        for number, layer in enumerate(model.language.layers):
            normed = layer.input_layernorm(hidden)
            key, value = layers.key_value(layer, normed, angles)
            query = layers.queries(layer, normed, angles)
            decode._write(pool, step, number, key, value)
            hidden = layers.finish(layer, hidden, decode._attend(pool, step, number, query))
        return model.head(model.language.norm(hidden))

    return run


def fused_decoder(
    made: RandomModel, batch: Batch, device: torch.device, cuts: Any, temperature: float = 1.0
) -> Any:
    """A decoder whose lanes have generated `private_tokens`."""
    from common.vlm.cuda.decode_sampling import Choice
    from common.vlm.cuda.decoder import CudaDecoder

    pool = pool_of(made, batch, device)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    choice = Choice(
        temperature=temperature,
        forced=False,
        stops=ints(1, 2),
        suppressed=ints(3, 4),
        limits=torch.zeros(batch.rows, dtype=torch.int32, device=device),
    )
    decoder = CudaDecoder(SplitModel(made.model), pool, choice, cuts=cuts)
    for slot in range(batch.groups):
        decoder.start(
            slot,
            last_token=9,
            start_position=batch.prefix_tokens,
            limits=[batch.room] * batch.samples,
        )
    decoder.lanes.uniforms.uniform_()
    decoder.lanes.tokens.fill_(batch.private_tokens)
    return decoder


def time_step(
    made: RandomModel,
    batch: Batch,
    device: torch.device,
    report: Report,
    run: Callable[[], Any],
    reset: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Milliseconds of a step in a row of steps, over what its bytes would take."""

    def one(_: int) -> None:
        run()

    reset()
    calls, repeats = (10, 7) if device.type == "cuda" else (1, 1)
    many = measure_many(one, device=device, calls=calls, repeats=repeats)
    single = measure(lambda _: run(), device=device, prepare=reset, repeats=repeats).median_ms
    bound = batch.step_bytes(made, made.model.config) / report.facts["ceilings"]["copy_tbs"] / 1e9
    return {"ms": many, "single_ms": single, "bound_ms": bound, "over_bound": many / bound}


def plain_case(
    made: RandomModel, batch: Batch, device: torch.device, report: Report
) -> dict[str, Any]:
    """The plain step, in a graph on CUDA."""
    run = plain_step(made, batch, device)
    with torch.no_grad():
        if device.type != "cuda":
            return time_step(made, batch, device, report, run)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                run()
        torch.cuda.synchronize()
        return time_step(made, batch, device, report, graph.replay)


def fused_case(
    made: RandomModel, batch: Batch, device: torch.device, report: Report, cuts: Any
) -> dict[str, Any]:
    """The decoder's step, sampling and the copy of its state included."""
    decoder = fused_decoder(made, batch, device, cuts)
    rows = [(slot, lane) for slot in range(batch.groups) for lane in range(batch.samples)]
    decoder.set_rows(rows, bucket=batch.rows)
    if device.type == "cuda":
        decoder.capture(batch.rows)

    def reset() -> None:
        decoder.lanes.tokens.fill_(batch.private_tokens)
        decoder.lanes.finished.zero_()

    return time_step(made, batch, device, report, lambda: decoder.step(batch.rows), reset)


def agreement(
    made: RandomModel, batch: Batch, device: torch.device, *, early: bool
) -> dict[str, Any]:
    """Logits of the fused step against those of the plain one on the same pool."""
    from common.vlm.cuda.decode_parts import Cuts

    with torch.no_grad():
        cuts = dataclasses.replace(Cuts.of(rows=batch.rows), early=early)
        decoder = fused_decoder(made, batch, device, cuts)
        rows = [(slot, lane) for slot in range(batch.groups) for lane in range(batch.samples)]
        decoder.set_rows(rows, bucket=batch.rows)
        decoder.step(batch.rows)
        fast = decoder._buffers_of(batch.rows).logits[0].float()
        pool, model = decoder.pool, decoder.model
        step = decode._step(
            pool, [r[0] for r in rows], [r[1] for r in rows], [batch.private_tokens] * len(rows)
        )
        tokens = torch.full((batch.rows,), 9, device=device)
        position = batch.prefix_tokens + batch.private_tokens
        plain = decode._advance(model, pool, step, tokens, [position] * batch.rows).float()
    return {
        "relative": float((fast - plain).norm() / plain.norm()),
        "max": float((fast - plain).abs().max()),
        "scale": float(plain.abs().max()),
    }


def run_all(
    made: RandomModel, report: Report, device: torch.device, shape: str, sms: int | None
) -> None:
    """Sweeps, then steps of several batches."""
    if shape == "3b":
        sizes = {"prefix_tokens": 6144, "private_tokens": 256, "room": 512}
        batches = {
            "64 (8 x 8)": Batch(groups=8, samples=8, **sizes),
            "8 (2 x 4)": Batch(groups=2, samples=4, **sizes),
            "256 (32 x 8)": Batch(groups=32, samples=8, **sizes),
        }
    else:
        sizes = {"prefix_tokens": 40, "private_tokens": 3, "room": 200}
        batches = {"6 (2 x 3)": Batch(groups=2, samples=3, **sizes)}
    fused = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    for name, batch in batches.items():
        report.case(f"step plain {name}", lambda b=batch: plain_case(made, b, device, report))
        if not fused:
            continue
        fused_cases(name, batch, made, report, device, sms)


def fused_cases(
    name: str,
    batch: Batch,
    made: RandomModel,
    report: Report,
    device: torch.device,
    sms: int | None,
) -> None:
    """Everything about the fused step of one batch; launching early needs a GPU."""
    from common.vlm.cuda.decode_parts import Cuts

    default = dataclasses.replace(Cuts.of(rows=batch.rows), early=False)
    early = device.type == "cuda"
    report.case(f"agreement {name}", lambda: agreement(made, batch, device, early=False))
    sweep = Sweep(made, report, device, batch.groups, batch.samples, sms=sms)
    sweep.attention(name, pool_of, batch)
    sweep.products(name)
    report.case(f"rows {name}", sweep.row_kernels)

    def step(kind: str, cuts: Cuts) -> None:
        case = f"step fused {kind} {name}"
        report.case(case, lambda: fused_case(made, batch, device, report, cuts))

    step("default", default)
    best = dataclasses.replace(sweep.best(), early=False)
    step("best", best)
    step("library", dataclasses.replace(Cuts.vendor(), attention=best.attention, items=best.items))
    if early:
        report.case(f"agreement early {name}", lambda: agreement(made, batch, device, early=True))
        step("default early", dataclasses.replace(default, early=True))
        step("best early", dataclasses.replace(best, early=True))


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--shape", choices=("3b", "tiny"), default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--sms", type=int, help="multiprocessors that the swept kernels may fill; all by default"
    )
    parser.add_argument("--only", default="", help="parts of the names of cases, with commas")
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    load = workload(options.shape)
    only = tuple(part for part in options.only.split(",") if part)
    report = Report(only=only, path=options.json)
    report.facts = facts(device) | {"ceilings": ceilings(device, dtype, load.product_size)}
    print(report.facts, flush=True)
    made = random_model(load.config, device=device, dtype=dtype, train_vision=False)
    run_all(made, report, device, options.shape, options.sms)
    print(f"\n{report.facts}\n{report.table()}")


if __name__ == "__main__":
    main()
