"""A model whose parameters are plain tensors: a rank's own parts, for kernels that sum themselves.

The kernels of `common/vlm/cuda/` read the weights of these modules and call none of those that
they replace. Modules that are called in any case, the tower's merger and all of plain decoding,
sum over the ranks by themselves.

Shapes: S = tokens, C = vocabulary, c = rows of this rank, h = hidden width, n = ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from common.vlm.cuda.gradients import row_gradients
from common.vlm.loading import weight_layout
from common.vlm.parallel.group import ModelRanks, RankGroup
from common.vlm.parallel.shards import shards
from common.vlm.shape import vision_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import Qwen2_5_VLForConditionalGeneration

    from common.vlm.shape import ModelShape


class RankEmbedding(nn.Embedding):
    """Embeddings of which this rank has a range of rows; complete results on every rank."""

    group: RankGroup

    def forward(self, ids: Tensor) -> Tensor:
        """[S, h] of ids [S]; the gradient of the table goes straight to its accumulator."""
        return _EmbedOwnRows.apply(self.weight, ids, self.group)


class InputSplitLinear(nn.Linear):
    """A projection of which this rank has some input columns, and the whole bias."""

    group: RankGroup

    def forward(self, states: Tensor) -> Tensor:
        """Complete outputs on every rank, of this rank's columns of the inputs."""
        total = _SumForward.apply(F.linear(states, self.weight), self.group)
        return total if self.bias is None else total + self.bias


class OutputSplitLinear(nn.Linear):
    """A projection of which this rank has some output rows."""

    group: RankGroup

    def forward(self, states: Tensor) -> Tensor:
        """This rank's outputs, of inputs that are equal on all ranks; so is their gradient."""
        return F.linear(_SumBackward.apply(states, self.group), self.weight, self.bias)


def hold_own_parts(
    model: Qwen2_5_VLForConditionalGeneration, shape: ModelShape, mesh: DeviceMesh
) -> ModelRanks:
    """Make an empty model's parameters those of one rank, in place.

    Args:
        model: from `empty_model`, not bound yet.
        shape: of the same model; the mesh's size has to be legal for it.
        mesh: of n ranks, more than one.
    """
    group, degree = RankGroup(mesh), mesh.size()
    split_tower = vision_ranks(shape.vision, degree) > 1
    layout = weight_layout(model, train_vision=False, dtype=model.lm_head.weight.dtype)
    parts = shards(layout, shape, rank=group.rank, degree=degree)
    _replace_modules(model, group, split_tower=split_tower)
    own = {
        name: nn.Parameter(
            torch.empty(part.shape, dtype=model.lm_head.weight.dtype, device="meta"),
            requires_grad=False,
        )
        for name, part in parts.items()
    }
    for name in (*layout.names, *layout.aliases):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, own[layout.aliases.get(name, name)])
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
    if split_tower:
        for block in model.model.visual.blocks:
            block.attn.num_heads //= degree
    return ModelRanks(
        text=group,
        vision=group if split_tower else None,
        kv_parts=shape.kv_heads if degree > shape.kv_heads else None,
    )


def _replace_modules(model: Any, group: RankGroup, *, split_tower: bool) -> None:
    language, merger = model.model.language_model, model.model.visual.merger.mlp
    table = language.embed_tokens
    language.embed_tokens = RankEmbedding(
        table.num_embeddings, table.embedding_dim, device="meta", dtype=table.weight.dtype
    )
    language.embed_tokens.group = group
    for layer in language.layers:
        layer.self_attn.o_proj = _linear_like(layer.self_attn.o_proj, InputSplitLinear, group)
        layer.mlp.down_proj = _linear_like(layer.mlp.down_proj, InputSplitLinear, group)
    if split_tower:
        merger[0] = _linear_like(merger[0], OutputSplitLinear, group)
        merger[2] = _linear_like(merger[2], InputSplitLinear, group)


def _linear_like(
    old: Any, kind: type[InputSplitLinear | OutputSplitLinear], group: RankGroup
) -> nn.Linear:
    new = kind(
        old.in_features,
        old.out_features,
        bias=old.bias is not None,
        device="meta",
        dtype=old.weight.dtype,
    )
    new.group = group
    return new


class _SumForward(torch.autograd.Function):
    """The sum over the ranks; what follows is equal on all of them, and so is its gradient."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: RankGroup) -> Tensor:
        ctx.mark_dirty(partial)
        return group.sum(partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        del ctx
        return gradient, None


class _SumBackward(torch.autograd.Function):
    """The identity; its gradient is summed over the ranks, each of which has a part of it."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.sum(gradient.clone(memory_format=torch.contiguous_format)), None


class _EmbedOwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, group: RankGroup) -> Tensor:
        rows = weight.shape[0]
        absent = (ids // rows != group.rank)[:, None]
        # any own row will do for absent ones; many different ones are the fastest to add zeros to
        index = ids % rows
        ctx.save_for_backward(index, absent)
        ctx.weight = weight
        return group.sum(F.embedding(index, weight).masked_fill_(absent, 0))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        index, absent = ctx.saved_tensors
        return row_gradients(ctx.weight, index, gradient.masked_fill(absent, 0)), None, None
