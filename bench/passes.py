"""Speed of the split pass: prefix, responses, vocabulary and vision, plain and fused.

`python -m bench.passes --shape 3b --device cuda --json out.json` measures, in one process, the
device's ceilings and each variant; `--shape tiny --device cpu` runs the plain ones anywhere.
Prints one line a case, then all again as a table; `--only prefix,vision` limits the cases.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.flex import FlexConcatenated
from bench.pass_kernels import add_kernel_cases
from bench.shapes import RandomModel, Workload, random_model, text_prompt, workload
from bench.timing import Report, ceilings, facts, measure
from common.vlm.attention import SdpaAttention
from common.vlm.loading import text_config, vision_config
from common.vlm.model import SplitModel
from common.vlm.prefix import PrefixKV, prefix_backward
from common.vlm.vision import PlainBlocks, vision_tower

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from common.vlm.cuda.attention import Library
    from common.vlm.prompt import PromptTensors


class Passes:
    """The cases of one model; variants share its weights."""

    def __init__(
        self, load: Workload, made: RandomModel, report: Report, device: torch.device, repeats: int
    ) -> None:
        self.load, self.made, self.report = load, made, report
        self.device, self.repeats = device, repeats
        self.prompt: PromptTensors = text_prompt(load.config, load.prefix_tokens, device)
        self.no_vision = torch.zeros(
            (0, text_config(load.config).hidden_size), device=device, dtype=made.weights.dtype
        )
        self.lengths = [load.response_tokens] * load.responses
        generator = torch.Generator().manual_seed(2)
        self.tokens: Tensor = torch.randint(8, 200, (sum(self.lengths),), generator=generator).to(
            device
        )

    def time(self, run: Callable[[Any], Any], prepare: Callable[[], Any] = lambda: None) -> float:
        """Median milliseconds."""
        return measure(run, device=self.device, prepare=prepare, repeats=self.repeats).median_ms

    def layer_parameters(self) -> int:
        """Parameters of the text model's layers."""
        layers = self.made.model.model.language_model.layers
        return sum(p.numel() for p in layers.parameters())

    def rate(self, milliseconds: float, flops: float) -> dict[str, float]:
        """Milliseconds, TFLOP/s and percent of the measured ceiling."""
        tflops = flops / milliseconds / 1e9
        ceiling = self.report.facts["ceilings"]["tflops"]
        return {"ms": milliseconds, "tflops": tflops, "percent": 100 * tflops / ceiling}

    def prefix_forward(self, model: SplitModel) -> dict[str, Any]:
        """Without and with gradients, and what stays for the backward."""

        def run(_: Any) -> Any:
            return model.prefix_kv(self.prompt, self.no_vision)

        flops = 2 * self.layer_parameters() * self.load.prefix_tokens
        with torch.no_grad():
            plain_ms = self.time(run)
        found: dict[str, Any] = self.rate(self.time(run), flops)
        found["no_grad_ms"] = plain_ms
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            kept = run(None)
            saved = torch.cuda.memory_allocated(self.device) - before
            found["saved_mb_a_token"] = saved / self.load.prefix_tokens / 1e6
            del kept
        return found

    def prefix_backward(self, model: SplitModel) -> dict[str, Any]:
        """From gradients of K and V to the accumulator."""
        layers, heads = len(model.language.layers), text_config(self.load.config)
        width = heads.hidden_size // heads.num_attention_heads
        gradient = torch.randn(
            (layers, 2, heads.num_key_value_heads, self.load.prefix_tokens, width),
            device=self.device,
        ).to(self.made.weights.dtype)
        milliseconds = self.time(
            lambda prefix: prefix_backward(prefix, gradient),
            lambda: model.prefix_kv(self.prompt, self.no_vision),
        )
        return self.rate(milliseconds, 4 * self.layer_parameters() * self.load.prefix_tokens)

    def response(self, model: SplitModel) -> dict[str, Any]:
        """Forward alone, and forward with backward, of the packed row; no vocabulary."""
        with torch.no_grad():
            prefix = model.prefix_kv(self.prompt, self.no_vision)
        packed = torch.stack(
            [torch.stack(pair) for pair in zip(prefix.keys, prefix.values, strict=True)]
        )
        gradient = torch.zeros_like(packed)

        def forward(shared: PrefixKV) -> Tensor:
            start = self.prompt.start_position
            return model._response_hidden(5, start, shared, self.tokens, self.lengths, False)

        def both(_: Any) -> None:
            hidden = forward(PrefixKV.leaves(packed, gradient))
            hidden.backward(torch.ones_like(hidden))

        flops = 2 * self.layer_parameters() * sum(self.lengths)
        with torch.no_grad():
            shared = PrefixKV.unpack(packed)
            forward_ms = self.time(lambda _: forward(shared))
        found = self.rate(self.time(both), 3 * flops)
        return {"forward_ms": forward_ms, **found}

    def vocabulary(self, model: SplitModel) -> dict[str, Any]:
        """Log-probabilities of the row's tokens from hidden states."""
        weight = model.head.weight
        hidden = torch.randn(
            (len(self.tokens), weight.shape[1]), device=self.device, dtype=weight.dtype
        ).requires_grad_()

        def run(_: Any) -> Tensor:
            return model._steps.logprobs(
                model.head,
                hidden,
                self.tokens,
                temperature=1.0,
                suppressed=torch.tensor([3, 4], device=self.device),
                chunk_tokens=512,
            )

        def both(_: Any) -> None:
            run(None).sum().backward()

        flops = 2 * weight.numel() * len(self.tokens)
        with torch.no_grad():
            forward_ms = self.time(run)
        found: dict[str, Any] = {"forward_ms": forward_ms, **self.rate(self.time(both), 4 * flops)}
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            both(None)
            found["peak_gb"] = (torch.cuda.max_memory_allocated(self.device) - before) / 1e9
        return found

    def vision(self, model: SplitModel, *, train: bool) -> dict[str, Any]:
        """One image through the tower."""
        config = vision_config(self.load.config)
        patches = 1
        for size in self.load.image_grid:
            patches *= size
        pixel_width = config.in_channels * config.temporal_patch_size * config.patch_size**2
        pixels = torch.randn((patches, pixel_width), device=self.device)
        pixels = pixels.to(self.made.weights.dtype)
        grid = torch.tensor([self.load.image_grid])

        def run(_: Any) -> Tensor:
            return vision_tower(
                model.visual, pixels, grid, checkpointing=False, blocks=model._steps.vision
            )

        def both(_: Any) -> None:
            out = run(None)
            out.backward(torch.ones_like(out))

        flops = 2 * patches * sum(p.numel() for p in model.visual.blocks.parameters())
        with torch.no_grad():
            found = self.rate(self.time(run), flops)
        if train:
            found["with_backward_ms"] = self.time(both)
        return found

    def compare(self, model: SplitModel, plain: SplitModel) -> dict[str, Any]:
        """How far a variant's keys, log-probabilities and gradients are from the plain ones."""
        keys, logs = self._whole(plain)
        gradients = self.made.gradients.clone()
        again = self._whole(plain)[1]
        fast_keys, fast_logs = self._whole(model)
        return {
            "keys": _distance(fast_keys, keys),
            "logprob_max": float((fast_logs - logs).abs().max()),
            "logprob_mean": float((fast_logs - logs).abs().mean()),
            "plain_again_max": float((again - logs).abs().max()),
            "gradients": _distance(self.made.gradients, gradients),
        }

    def _whole(self, model: SplitModel) -> tuple[Tensor, Tensor]:
        """Keys of the last layer and log-probabilities; gradients are in the accumulator."""
        self.made.gradients.zero_()
        prefix = model.prefix_kv(self.prompt, self.no_vision)
        packed = torch.stack(
            [torch.stack(pair) for pair in zip(prefix.keys, prefix.values, strict=True)]
        ).detach()
        gradient = torch.zeros_like(packed)
        logprobs = model.response_logprobs(
            last_token=5,
            start_position=self.prompt.start_position,
            prefix=PrefixKV.leaves(packed, gradient),
            tokens_T=self.tokens,
            lengths_G=self.lengths,
            temperature=1.0,
            suppressed=None,
        )
        (logprobs * torch.linspace(-1, 1, len(logprobs), device=self.device)).sum().backward()
        prefix_backward(prefix, gradient)
        return packed[-1, 0].clone(), logprobs.detach()


def _distance(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm, in parts that fit beside everything else."""
    above = below = 0.0
    parts = zip(actual.flatten().split(1 << 26), expected.flatten().split(1 << 26), strict=True)
    for part, wanted in parts:
        above += float((part.double() - wanted.double()).square().sum())
        below += float(wanted.double().square().sum())
    return (above / below) ** 0.5


def variants(made: RandomModel, device: torch.device) -> dict[str, SplitModel]:
    """Name to model; without a GPU the fused ones need Triton's interpreter."""
    if device.type != "cuda":
        models = {"plain": SplitModel(made.model, attention=SdpaAttention())}
        if os.environ.get("TRITON_INTERPRET") == "1":
            from common.vlm.cuda.fused import FusedSteps

            steps = FusedSteps(vision=PlainBlocks())
            models["fused"] = SplitModel(made.model, steps=steps)
        return models
    from common.vlm.cuda.attention import FusedAttention
    from common.vlm.cuda.fused import FusedBlocks, FusedSteps
    from common.vlm.kernels import split_model

    models = {
        "plain": SplitModel(made.model, attention=FlexConcatenated()),
        "fused": split_model(made.model, "auto"),
    }
    libraries: tuple[Library, ...] = ("flash", "cudnn")
    for library in libraries:
        whole: Library | None = "cudnn" if library == "cudnn" else None
        models[f"fused/{library}"] = SplitModel(
            made.model,
            attention=FusedAttention(prefix=library, response=library),
            steps=FusedSteps(vision=FusedBlocks(whole=whole)),
        )
    return models


def run_all(passes: Passes, models: dict[str, SplitModel]) -> None:
    """All cases, the cheap ones first."""
    report, plain = passes.report, models["plain"]
    alike = {name: m for name, m in models.items() if name in ("plain", "fused")}
    for name, model in models.items():
        report.case(f"prefix forward {name}", lambda m=model: passes.prefix_forward(m))
        report.case(f"prefix backward {name}", lambda m=model: passes.prefix_backward(m))
    for name, model in models.items():
        report.case(f"response {name}", lambda m=model: passes.response(m))
    for name, model in alike.items():
        report.case(f"vocabulary {name}", lambda m=model: passes.vocabulary(m))
    for name, model in models.items():
        train = name == "fused"
        report.case(f"vision {name}", lambda m=model, t=train: passes.vision(m, train=t))
    for name, model in models.items():
        if name != "plain":
            report.case(f"compare {name}", lambda m=model: passes.compare(m, plain))


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--shape", choices=("3b", "tiny"), default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="parts of the names of cases, with commas")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    load = workload(options.shape)
    only = tuple(part for part in options.only.split(",") if part)
    report = Report(only=only, path=options.json)
    report.facts = facts(device) | {"ceilings": ceilings(device, dtype, load.product_size)}
    print(report.facts, flush=True)
    if device.type == "cuda":
        add_kernel_cases(report, load, device)
    made = random_model(load.config, device=device, dtype=dtype, train_vision=True)
    passes = Passes(load, made, report, device, options.repeats)
    run_all(passes, variants(made, device))
    print(f"\n{report.facts}\n{report.table()}")


if __name__ == "__main__":
    main()
