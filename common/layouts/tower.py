"""The vision tower's tensors of one rank. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.layouts.kinds import (
    LayoutName,
    attention,
    columns,
    gate_and_up,
    one_after_the_other,
    rows,
    whole,
)
from common.vlm.shape import QWEN3

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.layouts.rows import Cut
    from common.layouts.tensors import RankTensor
    from common.vlm.shape import ModelShape, VisionShape

_TOWER = "model.visual."
_BLOCK = f"{_TOWER}blocks.*."


def tower_tensors(shape: ModelShape, kind: LayoutName, cut: Cut) -> Iterator[RankTensor]:
    """Embeddings of patches, blocks and mergers.

    Queries, keys and values are one tensor in every layout, as they are in a checkpoint.
    """
    tower, newer = shape.vision, shape.model_type == QWEN3
    yield whole(
        f"{_TOWER}patch_embed.proj.weight", (tower.width, tower.patch_elements), 1, vision=True
    )
    if newer:
        yield whole(f"{_TOWER}patch_embed.proj.bias", (tower.width,), 1, vision=True)
        yield whole(f"{_TOWER}pos_embed.weight", (tower.positions, tower.width), 1, vision=True)
    for norm in ("norm1", "norm2"):
        yield from _norm(f"{_BLOCK}{norm}", tower.width, tower.depth, bias=newer)
    yield from _attention(tower, kind, cut)
    if newer:
        yield from _two_layers(
            (f"{_BLOCK}mlp.linear_fc1", f"{_BLOCK}mlp.linear_fc2"),
            (tower.width, tower.inner, tower.width),
            cut,
            tower.depth,
        )
    else:
        yield from _gated_mlp(tower, kind, cut)
    yield from _mergers(tower, cut, newer=newer)


def _norm(name: str, width: int, count: int, *, bias: bool) -> Iterator[RankTensor]:
    yield whole(f"{name}.weight", (width,), count, vision=True)
    if bias:
        yield whole(f"{name}.bias", (width,), count, vision=True)


def _attention(tower: VisionShape, kind: LayoutName, cut: Cut) -> Iterator[RankTensor]:
    name, width, head = f"{_BLOCK}attn.", tower.width, tower.width // tower.heads
    own = cut.heads(tower.heads, head)
    tails: tuple[tuple[str, tuple[int, ...]], ...] = (("weight", (width,)), ("bias", ()))
    for leaf, tail in tails:
        parts = [
            rows(f"{name}{letter}.{leaf}", (width, *tail), own, tower.depth, vision=True)
            for letter in "qkv"
        ]
        if kind is LayoutName.MEGATRON:
            yield from attention(kind, f"{name}qkv.{leaf}", parts, head)
        else:
            yield one_after_the_other(f"{name}qkv.{leaf}", parts)
    yield columns(f"{name}proj.weight", (width, width), own, tower.depth, vision=True)
    yield whole(f"{name}proj.bias", (width,), tower.depth, vision=True)


def _gated_mlp(tower: VisionShape, kind: LayoutName, cut: Cut) -> Iterator[RankTensor]:
    name, width, inner = f"{_BLOCK}mlp.", tower.width, tower.inner
    own = cut.even(inner)
    tails: tuple[tuple[str, tuple[int, ...]], ...] = (("weight", (width,)), ("bias", ()))
    for leaf, tail in tails:
        parts = [
            rows(f"{name}{one}_proj.{leaf}", (inner, *tail), own, tower.depth, vision=True)
            for one in ("gate", "up")
        ]
        yield from gate_and_up(kind, f"{name}gate_up_proj.{leaf}", parts)
    yield columns(f"{name}down_proj.weight", (width, inner), own, tower.depth, vision=True)
    yield whole(f"{name}down_proj.bias", (width,), tower.depth, vision=True)


def _two_layers(
    names: tuple[str, str], widths: tuple[int, int, int], cut: Cut, count: int
) -> Iterator[RankTensor]:
    """Two linear layers with biases, cut along the width between them."""
    (first, second), (into, between, out) = names, widths
    own = cut.even(between)
    yield rows(f"{first}.weight", (between, into), own, count, vision=True)
    yield rows(f"{first}.bias", (between,), own, count, vision=True)
    yield columns(f"{second}.weight", (out, between), own, count, vision=True)
    yield whole(f"{second}.bias", (out,), count, vision=True)


def _mergers(tower: VisionShape, cut: Cut, *, newer: bool) -> Iterator[RankTensor]:
    merged = tower.merged_patches * tower.width
    widths = (merged, merged, tower.out_width)
    name = f"{_TOWER}merger."
    yield from _norm(f"{name}{'norm' if newer else 'ln_q'}", tower.width, 1, bias=newer)
    layers = ("linear_fc1", "linear_fc2") if newer else ("mlp.0", "mlp.2")
    yield from _two_layers((name + layers[0], name + layers[1]), widths, cut, 1)
    if tower.deepstack:
        name = f"{_TOWER}deepstack_merger_list.*."
        yield from _norm(f"{name}norm", merged, tower.deepstack, bias=True)
        yield from _two_layers((name + layers[0], name + layers[1]), widths, cut, tower.deepstack)
