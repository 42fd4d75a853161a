"""Activations that autograd keeps for the backward, tensor by tensor, in bytes a token and rank.

Fused kernels (`common/vlm/cuda/`) keep what matrix products need and compute the rest again;
the library's modules keep what each of their operations asks for. Every table here is a claim
about that code.

Letters: h = model width, H and K = query and key/value heads of the rank, D = head width,
i = inner width of the MLP, s = bytes of an element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.vlm.shape import QWEN3, vision_ranks
from rollplex.plan.weights import kv_heads_of_rank

if TYPE_CHECKING:
    from common.vlm.shape import ModelShape

_FLOAT32 = 4
_INT64 = 8
_ROW_ALIGNMENT = 64
"""The fused MLP's inner width is rounded up to this."""
_PLANNED_TOKENS = 256
_LONG_TOKENS = 2048
"""Fused prefixes from this length on are extended to a multiple of `_PLANNED_TOKENS`."""

Saved = dict[str, float]
"""Bytes a token of one rank, by tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What one way of running a model keeps.

    Attributes:
        fused: on fused kernels, else on the library's modules.
        itemsize: bytes of an element of activations.
        ranks: of the tensor-parallel group.
        sequence_parallel: whether tensors of the model's width are split over the ranks.
    """

    shape: ModelShape
    fused: bool
    itemsize: int
    ranks: int = 1
    sequence_parallel: bool = False

    @property
    def heads_width(self) -> float:
        """H D of this rank."""
        return self.shape.heads * self.shape.head_width / self.ranks

    @property
    def keys_width(self) -> int:
        """K D of this rank."""
        return kv_heads_of_rank(self.shape, self.ranks) * self.shape.head_width

    @property
    def model_width(self) -> float:
        """h, or this rank's part of it."""
        return self.shape.width / (self.ranks if self.sequence_parallel else 1)

    def layer(self) -> Saved:
        """One decoder layer."""
        s, n, k = self.itemsize, self.heads_width, self.keys_width
        saved = {
            "queries, keys and values: (H + 2 K) D s": s * (n + 2 * k),
            "attention's result: H D s": s * n,
            "attention's log-sums: 4 H": _FLOAT32 * n / self.shape.head_width,
        }
        if self.shape.head_norms:
            saved |= self._head_norms()
        inner = self.shape.inner / self.ranks
        if self.fused:
            aligned = -(-inner // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
            return saved | {
                "layer input: h s": s * self.model_width,
                "residual sum: h s": s * self.model_width,
                "gate and up projection: 2 i s": 2 * s * aligned,
            }
        return saved | {
            "two norms: each a float32 copy, unit and result": 2 * self._norm(self.model_width),
            "gate, its activation, up, product: 4 i s": 4 * s * inner,
        }

    def prefix(self) -> Saved:
        """All layers of a prefix; of the last one there are only keys and values."""
        saved = {
            name: size * (self.shape.layers - 1) for name, size in self.layer().items()
        } | self._once()
        s, k = self.itemsize, self.keys_width
        saved["last layer: keys and values: 2 K D s"] = 2 * k * s
        if self.shape.head_norms:
            width = k * (s if self.fused else max(_FLOAT32, s) + s)
            saved["last layer: key norm"] = width
        return saved | self._last_input()

    def prefix_inputs(self) -> Saved:
        """A prefix that keeps layer inputs only, and the keys and values that were handed on."""
        layers, s = self.shape.layers, self.itemsize
        # keys and values are views of the buffer that holds the queries too
        beside = self.heads_width if self.fused else 0
        return {
            "layer inputs: h s": s * self.model_width * (layers - 1),
            "keys and values": s * (2 * self.keys_width * layers + beside * (layers - 1)),
        } | (self._last_input() | self._once())

    def response(self) -> Saved:
        """All layers of a row of responses, the last norm, and what the vocabulary needs."""
        last = self.itemsize * self.model_width
        return (
            {name: size * self.shape.layers for name, size in self.layer().items()}
            | self._once()
            | {"last norm": 2 * last if self.fused else self._norm(self.model_width)}
        )

    def padding(self, tokens: int) -> float:
        """Bytes, not a token but of a whole prefix: what extending it copies in every layer."""
        if not self.fused or tokens < _LONG_TOKENS or tokens % _PLANNED_TOKENS == 0:
            return 0.0
        longer = -(-tokens // _PLANNED_TOKENS) * _PLANNED_TOKENS
        copies = longer * (self.heads_width + 2 * self.keys_width)
        result = (longer - tokens) * self.heads_width
        return self.itemsize * (copies + result) * (self.shape.layers - 1)

    def _once(self) -> Saved:
        """Cosines, sines, token ids."""
        return {
            "cosines and sines: 2 D s": 2 * self.shape.head_width * self.itemsize,
            "token ids": _INT64,
        }

    def _last_input(self) -> Saved:
        """The last layer is norm and projection only, and never runs again."""
        if self.fused:
            return {"last layer: its input": self.itemsize * self.model_width}
        return {"last layer: its norm": self._norm(self.model_width)}

    def _norm(self, width: float) -> float:
        """A norm of the library: float32 copy, unit vector, weighted result, scale."""
        return width * (max(_FLOAT32, self.itemsize) + 2 * self.itemsize) + _FLOAT32

    def _head_norms(self) -> Saved:
        width, s = self.heads_width + self.keys_width, self.itemsize
        if self.fused:
            return {"queries and keys before their norms: (H + K) D s": width * s}
        scales = _FLOAT32 * width / self.shape.head_width
        return {
            "query and key norms: float32 copy and unit": width * (max(_FLOAT32, s) + s) + scales
        }


def tower(kept: Kept) -> Saved:
    """What a vision tower that trains keeps, in bytes a patch and rank."""
    vision, s = kept.shape.vision, kept.itemsize
    ranks = vision_ranks(vision, kept.ranks)
    whole = vision.width / (ranks if kept.sequence_parallel else 1)
    part, inner = vision.width / ranks, vision.inner / ranks
    float32_norm = whole * (max(_FLOAT32, s) + 2 * s) + _FLOAT32
    block = {
        "queries, keys and values": 3 * part * s,
        "attention's result": part * s,
        "attention's log-sums": _FLOAT32 * vision.heads / ranks,
    }
    if kept.shape.model_type == QWEN3:
        norm = whole * 2 * s + 2 * _FLOAT32
        block |= {"two norms: input and result": 2 * norm, "MLP: inner, activation": 2 * inner * s}
    elif kept.fused:
        norm = float32_norm
        aligned = -(-inner // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        block |= {
            "block input and residual sum": 2 * whole * s,
            "gate and up projection": 2 * aligned * s,
        }
    else:
        norm = float32_norm
        block |= {
            "two norms: each a float32 copy, unit and result": 2 * norm,
            "gate, its activation, up, product": 4 * inner * s,
            "attention's result in order": part * s,
        }
    mergers = 1 + vision.deepstack
    return {name: size * vision.depth for name, size in block.items()} | {
        "mergers": mergers * (norm + 2 * part * s),
        "pixels": vision.patch_elements * s,
        "cosines and sines": 2 * vision.width / vision.heads * s,
    }


def tower_inputs(kept: Kept) -> Saved:
    """The same with block inputs only."""
    vision = kept.shape.vision
    ranks = vision_ranks(vision, kept.ranks) if kept.sequence_parallel else 1
    saved = tower(kept)
    blocks = {"block inputs": kept.itemsize * vision.width / ranks * vision.depth}
    return blocks | {name: saved[name] for name in ("mergers", "pixels", "cosines and sines")}
