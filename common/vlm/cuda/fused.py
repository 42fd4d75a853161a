"""The split pass's steps on fused kernels.

Shapes: S = tokens, h = hidden width, H = query heads, K = key/value heads, D = head width,
N = patches.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from common.vlm.cuda.attention import PackedRow, dense_attention, packed_attention
from common.vlm.cuda.blocks import project_heads, residual_mlp
from common.vlm.cuda.gradients import row_gradients, vector_gradients
from common.vlm.cuda.norms import rms_norm, rms_norm_backward
from common.vlm.cuda.vocabulary import token_logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.vlm.cuda.attention import Library
    from common.vlm.layers import Rotary
    from common.vlm.parallel.group import ModelRanks, RankGroup
    from common.vlm.vision import VisionBlocks


class FusedSteps:
    """Implements `common.vlm.steps.LayerSteps` for CUDA devices, float32 and narrower."""

    def __init__(
        self, *, vision: VisionBlocks | None = None, ranks: ModelRanks | None = None
    ) -> None:
        """Choose the vision tower's blocks, and say which ranks there are.

        Args:
            vision: those of this module if not given.
            ranks: over which the model is split, from `hold_own_parts`; None for one rank.
        """
        self.group: RankGroup | None = None if ranks is None else ranks.text
        self._kv_parts = None if ranks is None else ranks.kv_parts
        tower = None if ranks is None else ranks.vision
        self.vision: VisionBlocks = vision or FusedBlocks(group=tower)

    def embed(self, embedding: Any, ids: Tensor) -> Tensor:
        """See `LayerSteps.embed`."""
        if self.group is not None:
            return embedding(ids)
        return _Embed.apply(embedding.weight, ids)

    def norm(self, norm: Any, hidden: Tensor) -> Tensor:
        """See `LayerSteps.norm`."""
        return _Norm.apply(hidden, norm.weight, norm.variance_epsilon)

    def query_key_value(
        self, layer: Any, hidden: Tensor, angles: Rotary
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `LayerSteps.query_key_value`."""
        attention = layer.self_attn
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        query, key, value = project_heads(
            hidden,
            angles,
            norm=layer.input_layernorm,
            projections=projections,
            head_counts=tuple(p.out_features // attention.head_dim for p in projections),
            group=self.group,
            kv_parts=self._kv_parts,
        )
        return query, key, value

    def key_value(self, layer: Any, hidden: Tensor, angles: Rotary) -> tuple[Tensor, Tensor]:
        """See `LayerSteps.key_value`."""
        attention = layer.self_attn
        projections = [attention.k_proj, attention.v_proj]
        key, value = project_heads(
            hidden,
            angles,
            norm=layer.input_layernorm,
            projections=projections,
            head_counts=tuple(p.out_features // attention.head_dim for p in projections),
            group=self.group,
            kv_parts=self._kv_parts,
        )
        return key, value

    def finish(self, layer: Any, hidden: Tensor, attended: Tensor) -> Tensor:
        """See `LayerSteps.finish`."""
        mlp = layer.mlp
        return residual_mlp(
            hidden,
            attended.transpose(0, 1).reshape(hidden.shape[0], -1),
            norm=layer.post_attention_layernorm,
            projections=[layer.self_attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj],
            group=self.group,
        )

    def logits(self, head: Any, hidden: Tensor) -> Tensor:
        """See `LayerSteps.logits`."""
        own = head(hidden)
        if self.group is None:
            return own
        all_ranks = own.new_empty((self.group.size, *own.shape))
        self.group.gather(own, all_ranks)
        return all_ranks.transpose(0, 1).flatten(1)

    def logprobs(
        self,
        head: Any,
        hidden: Tensor,
        tokens: Tensor,
        *,
        temperature: float,
        suppressed: Tensor | None,
        chunk_tokens: int,
    ) -> Tensor:
        """See `LayerSteps.logprobs`; the vocabulary is cut, not the rows."""
        del chunk_tokens
        return token_logprobs(
            hidden,
            head.weight,
            tokens,
            temperature=temperature,
            suppressed=suppressed,
            group=self.group,
        )


class FusedBlocks:
    """Implements `common.vlm.vision.VisionBlocks`: no padding, no gathered windows."""

    def __init__(self, *, whole: Library | None = None, group: RankGroup | None = None) -> None:
        """Choose kernels.

        Args:
            whole: for a row that is one single segment; the packed kernel if not given.
            group: the ranks that have the tower's other heads and inner columns; None for none.
        """
        self._whole = whole
        self._group = group

    def embed(self, patch_embed: Any, pixels: Tensor) -> Tensor:
        """See `VisionBlocks.embed`: a convolution whose stride is its kernel is one product."""
        weight = patch_embed.proj.weight
        return F.linear(pixels.to(weight.dtype), weight.view(weight.shape[0], -1))

    def plan(self, bounds: Sequence[int], device: torch.device) -> PackedRow:
        """See `VisionBlocks.plan`."""
        lengths = [end - start for start, end in pairwise(bounds)]
        return PackedRow(
            bounds=torch.tensor(bounds, dtype=torch.int32, device=device), longest=max(lengths)
        )

    def block(self, block: Any, hidden: Tensor, angles: Rotary, plan: PackedRow) -> Tensor:
        """See `VisionBlocks.block`."""
        attention = block.attn
        heads = attention.num_heads
        query, key, value = project_heads(
            hidden,
            angles,
            norm=block.norm1,
            projections=[attention.qkv],
            head_counts=(heads, heads, heads),
            group=self._group,
        )
        attended = self.attend(query, key, value, plan)
        mlp = block.mlp
        return residual_mlp(
            hidden,
            attended.transpose(0, 1).reshape(hidden.shape[0], -1),
            norm=block.norm2,
            projections=[attention.proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj],
            group=self._group,
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: PackedRow) -> Tensor:
        """Attention [heads, N, D] of [heads, N, D], every patch seeing all of its segment."""
        if self._whole is not None and plan.longest == query.shape[1]:
            return dense_attention(query, key, value, causal=False, library=self._whole)
        return packed_attention(query, key, value, plan)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.weight, ctx.eps = weight, eps
        return rms_norm(hidden, weight, eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        grad_hidden, grad_weight, _ = rms_norm_backward(
            gradient.contiguous(), hidden, ctx.weight, ctx.eps, None
        )
        return grad_hidden, *vector_gradients([ctx.weight], grad_weight), None


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        return row_gradients(ctx.weight, ids, gradient), None
