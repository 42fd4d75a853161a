"""Single kernels of the passes: matrix products of a layer, attentions, elementwise work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bench.timing import measure, measure_many
from common.vlm.loading import head_dim, text_config, vision_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from bench.shapes import Workload
    from bench.timing import Report

DTYPE = torch.bfloat16


def add_kernel_cases(report: Report, load: Workload, device: torch.device) -> None:
    """Run all of them."""
    rows = load.prefix_tokens
    report.case("kernel products of a layer", lambda: _products(load, rows, device))
    packed = load.responses * load.response_tokens
    report.case("kernel products of a row", lambda: _products(load, packed, device))
    report.case("kernel products of vision", lambda: _vision_products(load, device))
    for library in ("flash", "cudnn"):
        report.case(
            f"kernel attention prefix {library}",
            lambda name=library: _dense(load, device, name, rows, rows, causal=True),
        )
        report.case(
            f"kernel attention responses {library}",
            lambda name=library: _dense(load, device, name, packed, rows, causal=False),
        )
        report.case(f"kernel plan {library}", lambda name=library: _plan(load, device, name))
    report.case("kernel attention own", lambda: _own(load, device))
    report.case("kernel attention vision", lambda: _vision_attention(load, device))
    report.case("kernel elementwise", lambda: _elementwise(load, device))
    report.case("kernel accumulate", lambda: _accumulate(device))


def _random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=DTYPE)


def _products(load: Workload, rows: int, device: torch.device) -> dict[str, Any]:
    """TFLOP/s of forward, input gradient, and weight gradient into float32."""
    from common.vlm.cuda.gradients import add_product

    text = text_config(load.config)
    hidden, inner = text.hidden_size, text.intermediate_size
    kv = 2 * text.num_key_value_heads * head_dim(load.config)
    found: dict[str, Any] = {}
    for name, outputs, inputs in (
        ("qkv", hidden + kv, hidden),
        ("out", hidden, hidden),
        ("gate_up", 2 * inner, hidden),
        ("down", hidden, inner),
    ):
        weight, x = (_random(outputs, inputs, device=device), _random(rows, inputs, device=device))
        y = _random(rows, outputs, device=device)
        total = torch.zeros(outputs, inputs, device=device)
        same = torch.zeros_like(weight)
        works: tuple[tuple[str, Callable[[int], Any]], ...] = (
            ("fwd", lambda _, x=x, w=weight: x @ w.t()),
            ("dx", lambda _, y=y, w=weight: y @ w),
            ("dw32", lambda _, y=y, x=x, t=total: add_product(t, y.t(), x)),
            ("dw16", lambda _, y=y, x=x, t=same: t.addmm_(y.t(), x)),
        )
        for kind, work in works:
            try:
                ms = measure_many(work, device=device, calls=5)
                found[f"{name}_{kind}"] = 2 * rows * outputs * inputs / ms / 1e9
            except RuntimeError as error:
                found[f"{name}_{kind}"] = f"failed: {str(error)[:120]}"
    return found


def _vision_products(load: Workload, device: torch.device) -> dict[str, Any]:
    """The same for the tower's odd inner width, plain and widened."""
    vision = vision_config(load.config)
    rows, hidden, inner = 24576, vision.hidden_size, vision.intermediate_size
    x = _random(rows, hidden, device=device)
    found: dict[str, Any] = {}
    for width in (inner, -(-inner // 64) * 64):
        up, down = _random(width, hidden, device=device), _random(hidden, width, device=device)
        y = _random(rows, width, device=device)
        for kind, work in (
            ("up", lambda _, u=up: x @ u.t()),
            ("down", lambda _, y=y, d=down: y @ d.t()),
        ):
            ms = measure_many(work, device=device, calls=5)
            found[f"{kind}_{width}"] = 2 * rows * hidden * width / ms / 1e9
    return found


def _dense(
    load: Workload, device: torch.device, library: str, queries: int, keys: int, *, causal: bool
) -> dict[str, Any]:
    from common.vlm.cuda.attention import dense_attention

    text, width = text_config(load.config), head_dim(load.config)
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
    query = _random(queries, heads, width, device=device).transpose(0, 1).requires_grad_()
    key, value = (
        _random(keys, kv_heads, width, device=device).transpose(0, 1).requires_grad_()
        for _ in range(2)
    )
    flops = 4 * heads * width * queries * keys / (2 if causal else 1)

    def run() -> Tensor:
        return dense_attention(query, key, value, causal=causal, library=library)  # type: ignore[arg-type]

    with torch.no_grad():
        forward = measure(lambda _: run(), device=device)
    gradient = _random(queries, heads, width, device=device).transpose(0, 1)
    backward = measure(
        lambda out: torch.autograd.grad(out, (query, key, value), gradient),
        device=device,
        prepare=run,
    )
    return {
        "fwd_ms": forward.median_ms,
        "fwd_tflops": flops / forward.median_ms / 1e9,
        "bwd_ms": backward.median_ms,
        "bwd_tflops": 2.5 * flops / backward.median_ms / 1e9,
        "first_fwd_ms": forward.first_ms,
        "first_bwd_ms": backward.first_ms,
    }


def _plan(load: Workload, device: torch.device, library: str) -> dict[str, Any]:
    """What the first call costs at shapes that were not seen before."""
    found: dict[str, Any] = {}
    for more in (1, 2, 3):
        rows = load.prefix_tokens + 40 * more + 1
        done = _dense(load, device, library, rows, rows, causal=True)
        found |= {f"fwd_{more}": done["first_fwd_ms"], f"bwd_{more}": done["first_bwd_ms"]}
    return found


def _own(load: Workload, device: torch.device) -> dict[str, Any]:
    """Responses against themselves, forward and backward together with the merge."""
    from common.vlm.cuda.attention import FusedAttention

    text, width = text_config(load.config), head_dim(load.config)
    lengths = [load.response_tokens] * load.responses
    rows = sum(lengths)
    query = _random(rows, text.num_attention_heads, width, device=device).transpose(0, 1)
    kv = [
        _random(count, text.num_key_value_heads, width, device=device).transpose(0, 1)
        for count in (0, 0, rows, rows, load.prefix_tokens, load.prefix_tokens)
    ]
    backend = FusedAttention()
    plan = backend.plan(0, lengths, device)
    alone, both = (
        measure(
            lambda _, at=at: backend.responses(query, (kv[at], kv[at + 1]), (kv[2], kv[3]), plan),
            device=device,
        ).median_ms
        for at in (0, 4)
    )
    return {"own_ms": alone, "with_prefix_and_merge_ms": both}


def _vision_attention(load: Workload, device: torch.device) -> dict[str, Any]:
    from common.vlm.cuda.attention import dense_attention, packed_attention
    from common.vlm.cuda.fused import FusedBlocks

    vision = vision_config(load.config)
    rows, heads = 24576, vision.num_heads
    states = _random(3, rows, heads, vision.hidden_size // heads, device=device).transpose(1, 2)
    query, key, value = states.unbind(0)
    windows = FusedBlocks().plan(range(0, rows + 1, 64), device)
    whole = FusedBlocks().plan([0, rows], device)
    found = {
        "windows_packed": measure(
            lambda _: packed_attention(query, key, value, windows), device=device
        ).median_ms,
        "whole_packed": measure(
            lambda _: packed_attention(query, key, value, whole), device=device
        ).median_ms,
    }
    for library in ("flash", "cudnn"):
        found[f"whole_{library}"] = measure(
            lambda _, name=library: dense_attention(
                query,
                key,
                value,
                causal=False,
                library=name,
            ),
            device=device,
        ).median_ms
    return found


def _elementwise(load: Workload, device: torch.device) -> dict[str, Any]:
    """TB/s, bytes read plus written."""
    from common.vlm.cuda import activations, norms

    text = text_config(load.config)
    rows, hidden, inner = load.prefix_tokens, text.hidden_size, text.intermediate_size
    x, y = _random(rows, hidden, device=device), _random(rows, hidden, device=device)
    weight = _random(hidden, device=device)
    joint, more = (_random(rows, 2 * inner, device=device) for _ in range(2))
    product, grad = (_random(rows, inner, device=device) for _ in range(2))
    gate, up = joint.chunk(2, dim=1)
    grad_gate, grad_up = more.chunk(2, dim=1)
    heads = text.num_attention_heads + 2 * text.num_key_value_heads
    states = _random(rows, heads, head_dim(load.config), device=device)
    turned = heads - text.num_key_value_heads
    cos, sin = (_random(rows, head_dim(load.config), device=device) for _ in range(2))
    works: dict[str, tuple[float, Callable[[int], Any]]] = {
        "norm": (2 * x.nbytes, lambda _: norms.rms_norm(x, weight, 1e-6)),
        "add_norm": (4 * x.nbytes, lambda _: norms.add_rms_norm(x, y, weight, 1e-6)),
        "norm_bwd": (5 * x.nbytes, lambda _: norms.rms_norm_backward(y, x, weight, 1e-6, y)),
        "gated": (3 * product.nbytes, lambda _: activations.gated_silu(gate, up, product)),
        "gated_bwd": (
            6 * product.nbytes,
            lambda _: activations.gated_silu_backward(grad, gate, up, grad_gate, grad_up, product),
        ),
        "rotate": (
            2 * states.nbytes * turned / heads,
            lambda _: activations.rotate_in_place(states, turned, cos, sin),
        ),
        "torch_add": (3 * x.nbytes, lambda _: torch.add(x, y, out=y)),
    }
    return {
        name: size / measure_many(work, device=device) / 1e9 for name, (size, work) in works.items()
    }


def _accumulate(device: torch.device) -> dict[str, Any]:
    """Whether the product that adds in float32 is right."""
    from common.vlm.cuda.gradients import _adds_wide, add_product

    left, right = _random(512, 700, device=device), _random(700, 384, device=device)
    total = torch.randn(512, 384, device=device)
    expected = total.double() + left.double() @ right.double()
    add_product(total, left, right)
    error = (total.double() - expected).norm() / expected.norm()
    strided = torch.randn(700, 512, device=device, dtype=DTYPE)
    rows = torch.zeros(600, 384, device=device)
    add_product(rows[50:562], strided.t(), right)
    expected = strided.t().double() @ right.double()
    second = (rows[50:562].double() - expected).norm() / expected.norm()
    return {
        "in_place": _adds_wide(DTYPE),
        "error": float(error),
        "error_strided": float(second),
    }
