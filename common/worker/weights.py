"""The run's shared weights: which storages there are, and models bound to them.

Shapes: E elements of all weights of a layout, Et of its trainable part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from common.ids import Participant, Service, WeightsVersion
from common.tensors.spec import Residency, TensorSpec
from common.tensors.storage import Storage, StorageSpec
from common.tensors.views import tensor_view
from common.vlm.checkpoint import load_checkpoint
from common.vlm.kernels import split_model
from common.vlm.loading import empty_model, load_config, suppressed_token_ids, weight_layout
from common.vlm.parallel.model import config_shape, parallel_model
from common.vlm.parallel.pieces import pieces
from common.vlm.parallel.shards import rank_layout, shards
from common.vlm.random_weights import fill_random
from common.weights.binding import bind_parameters, bind_tensors
from common.worker.scope import dtype_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from common.vlm.model import SplitModel
    from common.vlm.parallel.pieces import Piece
    from common.vlm.parallel.shards import Shard
    from common.weights.layout import WeightLayout
    from common.worker.context import RunContext

POLICY_WEIGHTS = "policy.weights"
POLICY_GRADIENTS = "policy.gradients"
ROLLOUT_WEIGHTS = "rollout.weights"
"""The policy's in the rollout, where it has a copy of its own (`OWN_WEIGHTS`)."""
REFERENCE_WEIGHTS = "reference.weights"

REFERENCE_VERSION = WeightsVersion(0)
"""The reference never changes."""

KV = "kv"
"""The one tensor of a lease of prefix K/V, or of their gradients: [L, 2, K, P, D]."""
FLAT = "flat"
"""The one tensor of a storage of weights ([E]) or gradients ([Et])."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What every process derives alike from the model folder and the recipe."""

    config: Qwen2_5_VLConfig
    layout: WeightLayout
    """Of this rank."""
    whole: WeightLayout
    """Of the model without tensor parallelism."""
    parts: Mapping[str, Shard] | None
    """This rank's part of every parameter; None: it is the only rank."""
    pieces: Mapping[str, tuple[Piece, ...]]
    """The same in pieces that ranks of training and of the rollout have in common, by parameter,
    tied ones under each of their names; empty: both have one rank."""
    suppressed: torch.Tensor
    """[n] int64 ids that are never sampled."""


def model_shape(context: RunContext, path: Path, *, train_vision: bool) -> ModelShape:
    """Read the configuration and lay out the weights. Raises ModelFilesError, DegreeInvalid."""
    config = load_config(path)
    whole = _layout(context, config, train_vision=train_vision)
    layout, parts = _own_part(context, config, whole)
    return ModelShape(
        config=config,
        layout=layout,
        whole=whole,
        parts=parts,
        pieces=_pieces(context, whole, config),
        suppressed=torch.tensor(
            suppressed_token_ids(config), dtype=torch.int64, device=context.device
        ),
    )


def _pieces(
    context: RunContext, whole: WeightLayout, config: Qwen2_5_VLConfig
) -> dict[str, tuple[Piece, ...]]:
    shape, rolls_out = config_shape(config), context.participant.service is Service.ROLLOUT
    other = Service.LEARNER if rolls_out else Service.ROLLOUT
    degree = context.partners.count(other)
    if degree == context.degree == 1:
        return {}
    own = shards(whole, shape, rank=context.place.tensor_rank, degree=context.degree)
    others = [shards(whole, shape, rank=rank, degree=degree) for rank in range(degree)]
    found = {name: tuple(pieces(own[name], (one[name] for one in others))) for name in own}
    return found | {name: found[entry] for name, entry in whole.aliases.items()}


def policy_shape(context: RunContext) -> ModelShape:
    """The policy's shape under the recipe."""
    model = context.recipe.model
    return model_shape(context, model.path, train_vision=model.train_vision)


def policy_layout(context: RunContext) -> WeightLayout:
    """The layout of the policy's shape, which takes no device. Raises ModelFilesError."""
    model = context.recipe.model
    config = load_config(model.path)
    whole = _layout(context, config, train_vision=model.train_vision)
    return _own_part(context, config, whole)[0]


def _own_part(
    context: RunContext, config: Qwen2_5_VLConfig, whole: WeightLayout
) -> tuple[WeightLayout, dict[str, Shard] | None]:
    """This rank's layout and part of every parameter; None: it is the only rank."""
    if context.degree == 1:
        return whole, None
    place = {"rank": context.place.tensor_rank, "degree": context.degree}
    parts = shards(whole, config_shape(config), **place)
    return rank_layout(whole, parts, **place), parts


def _layout(context: RunContext, config: Qwen2_5_VLConfig, *, train_vision: bool) -> WeightLayout:
    model = empty_model(config, dtype=context.dtype)
    return weight_layout(model, train_vision=train_vision, dtype=context.dtype)


def reference_shape(context: RunContext) -> ModelShape:
    """The reference's shape: nothing of it trains."""
    model = context.recipe.model
    return model_shape(context, model.reference_path or model.path, train_vision=False)


def first_weights(context: RunContext, path: Path, shape: ModelShape, flat: torch.Tensor) -> None:
    """Fill a storage with what a run begins with: the folder's weights, or random ones.

    Args:
        path: model folder.
        flat: [E]; written. Its kernels may still run.
    Raises: what `load_checkpoint` does.
    """
    if context.recipe.model.weights == "random":
        fill_random(flat, shape.layout, seed=context.recipe.seed, shards=shape.parts)
    else:
        load_checkpoint(path, shape.layout, flat, shards=shape.parts)


def flat_spec(
    elements: int,
    dtype: torch.dtype,
    *,
    readers: Sequence[Participant],
    writers: Sequence[Participant],
    residency: Residency = Residency.PINNED,
) -> StorageSpec:
    """A storage of one flat tensor."""
    tensor = TensorSpec(name=FLAT, dtype=dtype_name(dtype), shape=(elements,))
    return StorageSpec(
        tensors=(tensor,), readers=tuple(readers), writers=tuple(writers), residency=residency
    )


def shared_model(
    context: RunContext, shape: ModelShape, weights: Storage, gradients: Storage | None
) -> SplitModel:
    """The model whose parameters are the shared storage itself.

    Args:
        gradients: the accumulator that `.grad` is a view of; None: nothing trains here.
    """
    model = empty_model(shape.config, device=context.device, dtype=context.dtype)
    flat_gradients = None if gradients is None else tensor_view(gradients, FLAT)
    split = _split_over_ranks(context, model)
    bind_parameters(model, shape.layout, tensor_view(weights, FLAT), flat_gradients)
    return split or split_model(model, context.recipe.model.kernels)


def resharded_model(
    context: RunContext, shape: ModelShape, weights: Mapping[str, torch.Tensor]
) -> SplitModel:
    """The model whose parameters are these tensors; nothing of it trains.

    Args: weights: this rank's part of each parameter, by name.
    Raises: MissingWeight naming every parameter that has none.
    """
    model = empty_model(shape.config, device=context.device, dtype=context.dtype)
    split = _split_over_ranks(context, model)
    bind_tensors(model, shape.layout, weights, {})
    return split or split_model(model, context.recipe.model.kernels)


def _split_over_ranks(
    context: RunContext, model: Qwen2_5_VLForConditionalGeneration
) -> SplitModel | None:
    """Before its parameters are bound; None: there is one rank."""
    mesh = None if context.joined is None else context.joined.mesh
    if mesh is None:
        return None
    return parallel_model(model, mesh, kernels=context.recipe.model.kernels)
