"""A model of which every rank runs its own heads, inner columns and range of the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from common.vlm.kernels import Kernels, fused_kernels, fused_model
from common.vlm.model import DEFAULT_LOGIT_CHUNK_TOKENS, SplitModel
from common.vlm.parallel.local import hold_own_parts
from common.vlm.parallel.modules import VocabularyEmbedding, share_heads
from common.vlm.parallel.shards import check_degree
from common.vlm.parallel.steps import ParallelSteps
from common.vlm.shape import ModelShape, shape_of, vision_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration


def config_shape(config: Qwen2_5_VLConfig) -> ModelShape:
    """The sizes that sharding goes by."""
    return shape_of(config.to_dict(), name="the model")


def parallel_model(
    model: Qwen2_5_VLForConditionalGeneration,
    mesh: DeviceMesh,
    *,
    kernels: Kernels = "auto",
    logit_chunk_tokens: int = DEFAULT_LOGIT_CHUNK_TOKENS,
) -> SplitModel:
    """Shard an empty model in place and return its split passes.

    On plain kernels its parameters are DTensors, on fused ones plain tensors of the rank's parts.

    Afterwards `bind_parameters` takes the rank's own layout and buffers, from
    `common.vlm.parallel.shards.rank_layout`. All ranks of the mesh have to run the same passes in
    the same order; what goes in has to be equal on all of them. Keys and values, and so packed
    buffers and decode pools, have the rank's own heads.

    Args:
        model: from `empty_model`, not bound yet.
        mesh: of one dimension, from `tensor_mesh`.
        kernels: as in the recipe; `fused_kernels` decides by the device that the model was made
            for and the dtype of its parameters.
        logit_chunk_tokens: as for `SplitModel`; fused kernels cut the vocabulary instead.
    Raises: DegreeInvalid if the mesh's size does not divide the model.
    """
    shape = config_shape(model.config)
    degree = mesh.size()
    check_degree(shape, degree)
    device = model.model.language_model.rotary_emb.inv_freq.device
    if fused_kernels(kernels, device=device, dtype=model.lm_head.weight.dtype):
        return fused_model(model, hold_own_parts(model, shape, mesh) if degree > 1 else None)
    steps = None
    if degree > 1:
        _shard_text(model, mesh, shape)
        if vision_ranks(shape.vision, degree) > 1:
            _shard_vision(model.model.visual, mesh)
        steps = ParallelSteps(mesh)
    return SplitModel(model, steps=steps, logit_chunk_tokens=logit_chunk_tokens)


def _shard_text(model: Any, mesh: DeviceMesh, shape: ModelShape) -> None:
    language, degree = model.model.language_model, mesh.size()
    table = language.embed_tokens
    embedding = VocabularyEmbedding(
        table.num_embeddings,
        table.embedding_dim,
        table.padding_idx,
        device="meta",
        dtype=table.weight.dtype,
    )
    for layer in language.layers:
        attention = layer.self_attn
        if degree > shape.kv_heads:
            for name in ("k_proj", "v_proj"):
                projection = share_heads(getattr(attention, name), mesh, shape.kv_heads)
                setattr(attention, name, projection)
    plan: dict[str, ParallelStyle] = {
        "layers.*.input_layernorm": _replicated_output(),
        "layers.*.self_attn.q_proj": ColwiseParallel(),
        "layers.*.self_attn.k_proj": ColwiseParallel(),
        "layers.*.self_attn.v_proj": ColwiseParallel(),
        "layers.*.self_attn.o_proj": RowwiseParallel(),
        "layers.*.post_attention_layernorm": _replicated_output(),
        "layers.*.mlp.gate_proj": ColwiseParallel(),
        "layers.*.mlp.up_proj": ColwiseParallel(),
        "layers.*.mlp.down_proj": RowwiseParallel(),
    }
    parallelize_module(language, mesh, plan, src_data_rank=None)
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel()}, src_data_rank=None)
    embedding.weight = nn.Parameter(model.lm_head.weight.detach(), requires_grad=False)
    language.embed_tokens = embedding
    for layer in language.layers:
        _count_own_rows(layer.self_attn, ("q_proj", "k_proj", "v_proj"), degree)


def _shard_vision(visual: Any, mesh: DeviceMesh) -> None:
    plan: dict[str, ParallelStyle] = {
        "blocks.*.norm1": _replicated_output(),
        "blocks.*.attn.qkv": ColwiseParallel(),
        "blocks.*.attn.proj": RowwiseParallel(),
        "blocks.*.norm2": _replicated_output(),
        "blocks.*.mlp.gate_proj": ColwiseParallel(),
        "blocks.*.mlp.up_proj": ColwiseParallel(),
        "blocks.*.mlp.down_proj": RowwiseParallel(),
        "merger.mlp.0": ColwiseParallel(),
        "merger.mlp.2": RowwiseParallel(),
    }
    parallelize_module(visual, mesh, plan, src_data_rank=None)
    for block in visual.blocks:
        block.attn.num_heads //= mesh.size()


def _replicated_output() -> PrepareModuleOutput:
    """One tensor for all projections that read it, so that their gradients are summed once."""
    return PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False
    )


def _count_own_rows(attention: Any, names: tuple[str, ...], degree: int) -> None:
    for name in names:
        getattr(attention, name).out_features //= degree
