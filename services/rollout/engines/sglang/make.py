"""SGLang for one rank of a run: what it reserves, which weights it reads, how it is set."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from common.config.sglang import SglangConfig
from common.tensors.views import tensor_view
from common.vlm.loading import head_dim, text_config
from common.vlm.names import VISUAL
from common.vlm.parallel.model import config_shape
from common.vlm.parallel.shards import local_kv_heads, rank_layout, shards
from common.worker.scope import HOLD_TIMEOUT_S
from common.worker.weights import FLAT, rollout_reads
from services.rollout.engines.sglang.driver import HostDriver
from services.rollout.engines.sglang.engine import SglangEngine
from services.rollout.engines.sglang.joined import JoinedDriver
from services.rollout.engines.sglang.messages import EngineSettings
from services.rollout.engines.sglang.weights import OfferedWeights
from services.rollout.window_memory import WindowMemory

if TYPE_CHECKING:
    from pathlib import Path

    from common.config.recipe import Recipe
    from common.tensors.storage import Storage
    from common.weights.layout import WeightLayout
    from common.worker.context import RunContext
    from common.worker.weights import ModelShape
    from services.rollout.engines.sglang.driver import Driver

RESERVATION = "rollout.sglang"
"""What the ledger calls SGLang's places for keys and values, weights of its own, and the rest that
its processes take."""
_SPARE_TOKENS = 16
"""That SGLang keeps free of each sequence, and more."""


async def make_sglang(
    context: RunContext, *, shape: ModelShape, weights: Storage
) -> tuple[SglangEngine, WindowMemory]:
    """The engine of this rank, not yet prepared, and what its processes take on its device.

    Args: weights: the policy's, of this rank.
    Raises: ArenaFull if there is no room for that; LeaseMisuse if a rank's weights cannot be mapped
        by the engine's processes.
    """
    config = context.recipe.rollout.sglang or SglangConfig()
    settings = _settings(context, config)
    kv_bytes = settings.kv_tokens * _token_bytes(context, shape)
    lasting_bytes = 0 if config.release_memory else kv_bytes
    if context.device.type == "cuda":
        lasting_bytes += config.process_mib << 20
    if config.weights == "copy":
        lasting_bytes += _text_elements(shape.layout) * context.dtype.itemsize
    memory = WindowMemory(
        context.broker,
        context.run_id,
        name=RESERVATION,
        lasting_bytes=lasting_bytes,
        window_bytes=kv_bytes if config.release_memory else 0,
    )
    await memory.take(timeout_s=HOLD_TIMEOUT_S)
    driver: Driver | None = None
    if context.leads:
        driver = await _host_driver(context, config, settings, shape=shape, weights=weights)
    mesh = None if context.joined is None else context.joined.mesh
    if mesh is not None:
        keeps_kv = not config.release_memory
        driver = JoinedDriver(mesh.get_group(), driver, keeps_kv=keeps_kv)
    assert driver is not None, "a rank that does not lead has joined the one that does"
    return SglangEngine(driver, max_requests=settings.max_requests, kv_bytes=kv_bytes), memory


async def _host_driver(
    context: RunContext,
    config: SglangConfig,
    settings: EngineSettings,
    *,
    shape: ModelShape,
    weights: Storage,
) -> HostDriver:
    """Of the engine of this replica, which reads the weights of all its ranks."""
    assert context.engine_python is not None, "the controller has looked for it"
    shared = []
    try:
        for one in context.ranks if config.weights == "alias" else ():
            name = rollout_reads(context, one)
            shared.append(await context.broker.share_storage(context.run_id, name))
    except BaseException:
        for memory in shared:
            os.close(memory.descriptor)
        raise
    offered = OfferedWeights(
        layouts=_layouts(shape, settings.ranks),
        flat=tensor_view(weights, FLAT),
        tensor=FLAT,
        shared=tuple(shared),
        bucket_bytes=config.bucket_mib << 20,
    )
    return HostDriver(context.engine_python, config, settings, offered, folder=_folder(context))


def _layouts(shape: ModelShape, degree: int) -> tuple[WeightLayout, ...]:
    """Of each rank's weights."""
    if degree == 1:
        return (shape.layout,)
    found = []
    for rank in range(degree):
        parts = shards(shape.whole, config_shape(shape.config), rank=rank, degree=degree)
        found.append(rank_layout(shape.whole, parts, rank=rank, degree=degree))
    return tuple(found)


def _folder(context: RunContext) -> Path:
    """For the engine's own files: each replica has an engine."""
    if context.place.replicas == 1:
        return context.run_dir
    return context.run_dir / f"replica-{context.place.replica}"


def _settings(context: RunContext, config: SglangConfig) -> EngineSettings:
    recipe = context.recipe
    return EngineSettings(
        model_path=str(recipe.model.path),
        device=context.device.type,
        gpu=context.device.index or 0,
        ranks=context.degree,
        dtype=recipe.model.dtype,
        seed=recipe.seed,
        max_requests=recipe.rollout.max_slots,
        context_tokens=_context_tokens(recipe),
        kv_tokens=config.kv_tokens or _step_tokens(recipe),
        step_tokens=_step_tokens(recipe),
        memory_fraction=config.memory_fraction,
        release_memory=config.release_memory,
        deterministic=config.deterministic,
        arguments=config.arguments,
    )


def _context_tokens(recipe: Recipe) -> int:
    """Of the longest prompt and response, and what SGLang keeps free itself."""
    return recipe.data.max_prompt_tokens + recipe.rollout.max_new_tokens + _SPARE_TOKENS


def _step_tokens(recipe: Recipe) -> int:
    """For `max_slots` full responses, and the longest prompt once a group of them."""
    rollout = recipe.rollout
    groups = rollout.max_slots // rollout.samples_per_group
    responses = rollout.max_slots * (rollout.max_new_tokens + _SPARE_TOKENS)
    return responses + groups * recipe.data.max_prompt_tokens


def _token_bytes(context: RunContext, shape: ModelShape) -> int:
    """Of a token's keys and values in all layers, on one rank."""
    heads = local_kv_heads(config_shape(shape.config), context.degree)
    elements = 2 * heads * head_dim(shape.config) * text_config(shape.config).num_hidden_layers
    return elements * context.dtype.itemsize


def _text_elements(layout: WeightLayout) -> int:
    """Of the weights that the engine has: it has no tower."""
    return sum(entry.numel for entry in layout.entries if not entry.name.startswith(VISUAL))
