"""What a step of the device decoder works with: cuts of its kernels, weights, buffers.

Shapes: R = rows of a step, B = slots, S = lanes of a slot, h = hidden width, H = query heads,
K = key/value heads, D = head width, i = inner width of the MLP, C = vocabulary. On several ranks
H, K, i and C are the rank's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from common.vlm.cuda.decode_attention import Blocks, Scratch
from common.vlm.cuda.decode_linear import Tiles, splits
from common.vlm.cuda.decode_ranks import Exchange
from common.vlm.cuda.decode_sampling import ChunkFacts
from common.vlm.cuda.gradients import adjacent
from common.vlm.errors import DecodeStateInvalid
from common.vlm.loading import head_dim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from common.vlm.decode_pool import DecodePool
    from common.vlm.model import SplitModel

UNUSED = -1
"""The lane of a row, or the row of a lane, that is not used."""

_LIBRARY_FROM_ROWS = 65
"""From here on the vendor's products are faster than those cut for streaming weights."""
_FEW_ROWS = 16
"""Up to here the same cuts are best with all SMs and with a part of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """How a step's kernels are cut and launched; a matter of speed only.

    Attributes:
        qkv, out, gate_up, down, head: tiles of the products; None for the vendor's library.
        attention: blocks of the attention kernels.
        items: pieces that all prefixes together are cut into.
        early: launch kernels before their predecessors have ended.
    """

    qkv: Tiles | None
    out: Tiles | None
    gate_up: Tiles | None
    down: Tiles | None
    head: Tiles | None
    attention: Blocks = field(default_factory=Blocks)
    items: int = 132
    early: bool = False

    @classmethod
    def vendor(cls) -> Cuts:
        """All products by the vendor's library."""
        return cls(qkv=None, out=None, gate_up=None, down=None, head=None)

    @classmethod
    def of(cls, *, rows: int, beside: bool = False) -> Cuts:
        """What was fastest for about this many rows, on an H200 with the 3B model.

        Args: beside: while others use a part of the SMs; sums are of the same parts.
        """
        if rows >= _LIBRARY_FROM_ROWS:
            return cls.vendor()
        if rows <= _FEW_ROWS:
            joint = Tiles(columns=64, inner=128, splits=4, stages=3)
            return cls(
                qkv=joint,
                out=joint,
                gate_up=Tiles(columns=64, inner=128, stages=3),
                down=Tiles(columns=128, inner=64, splits=8),
                head=Tiles(columns=128, inner=128, stages=3),
                items=66,
                early=True,
            )
        joint = Tiles(columns=64, inner=64 if beside else 128, splits=2, stages=6)
        gate_up = Tiles(columns=64, inner=64, stages=3) if beside else Tiles(columns=32, inner=64)
        down = Tiles(columns=64, inner=128, splits=4, stages=6)
        if beside:
            down = Tiles(columns=128, inner=64, splits=4)
        return cls(
            qkv=joint,
            out=joint,
            gate_up=gate_up,
            down=down,
            head=Tiles(columns=128, inner=64, stages=3),
            items=88,
            early=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Views of one layer's weights; each product's weight is one tensor.

    Attributes:
        qkv: [(H + 2 K) * D, h]; qkv_bias: [(H + 2 K) * D].
        out: [h, H * D].
        gate_up: [2 i, h]; down: [h, i].
        first_norm, second_norm: [h].
    """

    qkv: Tensor
    qkv_bias: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    first_norm: Tensor
    second_norm: Tensor
    eps: float

    @classmethod
    def of(cls, layer: Any) -> LayerWeights:
        """The weights of a decoder layer.

        Raises: DecodeStateInvalid if its parameters do not lie side by side in flat storage.
        """
        attention, mlp = layer.self_attn, layer.mlp
        heads = (attention.q_proj, attention.k_proj, attention.v_proj)
        return cls(
            qkv=_joined([p.weight for p in heads]),
            qkv_bias=_joined([p.bias for p in heads]),
            out=attention.o_proj.weight.detach(),
            gate_up=_joined([mlp.gate_proj.weight, mlp.up_proj.weight]),
            down=mlp.down_proj.weight.detach(),
            first_norm=layer.input_layernorm.weight.detach(),
            second_norm=layer.post_attention_layernorm.weight.detach(),
            eps=layer.input_layernorm.variance_epsilon,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Activations of one number of rows.

    Attributes:
        cuts: of the kernels that use them; those with as many splits and items can use them too.
        row_lane: [R] int32.
        hidden, normed: [R, h].
        qkv, out, down: [s, R, width] float32, parts of products.
        query, attended: [R, H, D].
        product: [1, R, i].
        logits: [1, R, C].
        facts: of the whole vocabulary.
        exchange: what ranks exchange; None for one rank.
    """

    cuts: Cuts
    row_lane: Tensor
    hidden: Tensor
    normed: Tensor
    qkv: Tensor
    query: Tensor
    attended: Tensor
    out: Tensor
    product: Tensor
    down: Tensor
    logits: Tensor
    facts: ChunkFacts
    scratch: Scratch
    exchange: Exchange | None

    @property
    def nbytes(self) -> int:
        """Device bytes of the largest of them."""
        held = [self.logits, self.product, self.scratch.item_out, self.scratch.own_out]
        exchanged = 0 if self.exchange is None else self.exchange.nbytes
        return sum(tensor.nbytes for tensor in held) + exchanged

    @classmethod
    def make(
        cls, model: SplitModel, pool: DecodePool, cuts: Cuts, *, rows: int, items: int
    ) -> Buffers:
        """Allocate for R rows and I prefix items."""
        width, group = head_dim(model.config), model.group
        device, dtype = pool.shared.device, model.dtype
        vocabulary, hidden = model.head.weight.shape
        layer = model.language.layers[0]
        heads = layer.self_attn.q_proj.out_features // width
        kv_heads = model.kv_heads

        def make(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        def parts(tiles: Tiles | None, columns: int) -> Tensor:
            return make(splits(tiles), rows, columns, kind=torch.float32)

        logits = make(1, rows, vocabulary)
        return cls(
            cuts=cuts,
            row_lane=torch.full((rows,), UNUSED, dtype=torch.int32, device=device),
            hidden=make(rows, hidden),
            normed=make(rows, hidden),
            qkv=parts(cuts.qkv, (heads + 2 * kv_heads) * width),
            query=make(rows, heads, width),
            attended=make(rows, heads, width),
            out=parts(cuts.out, hidden),
            product=make(1, rows, layer.mlp.gate_proj.out_features),
            down=parts(cuts.down, hidden),
            logits=logits,
            facts=ChunkFacts.make(
                rows=rows,
                vocabulary=vocabulary if group is None else vocabulary * group.size,
                device=device,
            ),
            scratch=Scratch.make(
                items=items,
                lanes=pool.samples,
                rows=rows,
                kv_heads=kv_heads,
                per_kv=heads // kv_heads,
                width=width,
                device=device,
            ),
            exchange=None if group is None else Exchange.make(group, logits[0], hidden=hidden),
        )


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    view = adjacent(tensors)
    if view is None:
        raise DecodeStateInvalid("a layer's projections do not lie side by side in flat storage")
    return view
