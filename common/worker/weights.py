"""The run's shared weights: which storages there are, and models bound to them.

Shapes: Es elements of a storage of weights, Et of a layout's trainable part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from common.ids import Participant, Service, WeightsVersion
from common.layouts.node import node_plan, training_sharing
from common.step.gpus import rank_beside, shared_gpu
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
from common.weights.binding import bind_tensors, views
from common.weights.placed import placed
from common.weights.places import WeightPlaces
from common.worker.scope import dtype_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from common.layouts.plan import SharingPlan
    from common.vlm.model import SplitModel
    from common.vlm.parallel.pieces import Piece
    from common.vlm.parallel.shards import Shard
    from common.weights.layout import WeightLayout
    from common.worker.context import RunContext

POLICY_WEIGHTS = "policy.weights"
POLICY_GRADIENTS = "policy.gradients"
ROLLOUT_WEIGHTS = "rollout.weights"
"""What a rank of the rollout has of the policy's by itself: a copy (`OWN_WEIGHTS`), or, at another
degree than training's, what is no view of training's."""
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
    places: WeightPlaces
    """Of these weights in their storage: as the layout has them, but for the policy's in training,
    if the plan has gaps there for what the rollout gathers."""
    plan: SharingPlan | None
    """What training and rollout share of the policy; None: every storage is its readers' whole."""
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
    """Read the configuration and lay out the weights, one after the other.

    Raises: ModelFilesError, DegreeInvalid.
    """
    config = load_config(path)
    whole = _layout(context, config, train_vision=train_vision)
    layout, parts = _own_part(context, config, whole)
    return ModelShape(
        config=config,
        layout=layout,
        places=WeightPlaces.dense(layout),
        plan=None,
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
    """The policy's shape under the recipe; in training, with gaps where the plan has them."""
    model = context.recipe.model
    shape = model_shape(context, model.path, train_vision=model.train_vision)
    plan = _policy_plan(context, shape.config)
    if plan is None:
        return shape
    if context.participant.service is Service.ROLLOUT:
        return replace(shape, plan=plan)
    sharing = training_sharing(plan, context.place.tensor_rank, replica=context.place.replica)
    return replace(shape, plan=plan, places=WeightPlaces.planned(shape.layout, sharing))


def _policy_plan(context: RunContext, config: Qwen2_5_VLConfig) -> SharingPlan | None:
    partners = context.partners
    degrees = partners.count(Service.LEARNER), partners.count(Service.ROLLOUT)
    if degrees[0] == degrees[1]:
        return None
    return node_plan(
        config_shape(config),
        train_tp=degrees[0],
        rollout_tp=degrees[1],
        element_bytes=context.dtype.itemsize,
        train_replicas=partners.replica_count(Service.LEARNER),
        rollout_replicas=partners.replica_count(Service.ROLLOUT),
    )


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


def first_weights(
    context: RunContext, path: Path, shape: ModelShape, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Fill weights with what a run begins with: the folder's, or random ones.

    Args:
        path: model folder.
        tensors: by name; written. Their kernels may still run.
    Raises: what `load_checkpoint` does.
    """
    if context.recipe.model.weights == "random":
        fill_random(tensors, seed=context.recipe.seed, shards=shape.parts)
    else:
        load_checkpoint(path, shape.layout, tensors, shards=shape.parts)


def shared_tensors(shape: ModelShape, weights: Storage) -> dict[str, torch.Tensor]:
    """A model's weights in their storage, by name."""
    return placed(tensor_view(weights, FLAT), shape.places)


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


def rollout_reads(context: RunContext, one: Participant) -> str:
    """The storage that has the policy's weights for a rank of the rollout, at equal degrees."""
    if context.push is not None:
        return context.storage_name(ROLLOUT_WEIGHTS, one.rank)
    gpu = shared_gpu(context.partners, one)
    return context.storage_name(POLICY_WEIGHTS, rank_beside(context.partners, gpu))


def shared_model(
    context: RunContext, shape: ModelShape, weights: Storage, gradients: Storage | None
) -> SplitModel:
    """The model whose parameters are the shared storage itself.

    Args:
        gradients: the accumulator that `.grad` is a view of; None: nothing trains here.
    """
    model = empty_model(shape.config, device=context.device, dtype=context.dtype)
    accumulators: dict[str, torch.Tensor] = {}
    if gradients is not None:
        names = [entry.name for entry in shape.layout.trainable_entries]
        accumulators = views(tensor_view(gradients, FLAT), shape.layout, names)
    split = _split_over_ranks(context, model)
    bind_tensors(model, shape.layout, shared_tensors(shape, weights), accumulators)
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
