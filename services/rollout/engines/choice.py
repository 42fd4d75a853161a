"""The engine that a recipe names, for one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.config.recipe import EngineName
from common.config.sglang import SglangConfig
from common.tensors.storage import Storage
from common.tensors.views import tensor_view
from common.vlm.loading import head_dim, text_config
from common.worker.scope import HOLD_TIMEOUT_S
from common.worker.weights import FLAT
from services.rollout.engines.native import NativeEngine
from services.rollout.engines.sglang.engine import SglangEngine
from services.rollout.engines.sglang.messages import EngineSettings
from services.rollout.engines.sglang.weights import OfferedWeights
from services.rollout.window_memory import WindowMemory

if TYPE_CHECKING:
    from common.config.recipe import Recipe
    from common.vlm.model import SplitModel
    from common.worker.context import RunContext
    from common.worker.sm_token import SmToken
    from common.worker.weights import ModelShape
    from services.rollout.engines.protocol import Engine
    from services.rollout.resharded import ReshardedWeights

RESERVATION = "rollout.sglang"
"""What the ledger calls SGLang's places for keys and values, and weights of its own."""
_SPARE_TOKENS = 16
"""That SGLang keeps free of each sequence, and more."""


async def make_engine(
    context: RunContext,
    *,
    shape: ModelShape,
    weights: Storage | ReshardedWeights,
    model: SplitModel,
    token: SmToken | None,
) -> tuple[Engine, WindowMemory]:
    """The recipe's engine, not yet prepared, and what its processes take; that is reserved.

    Args:
        weights: the policy's storage; of another degree than training's, for the native engine.
        model: bound to it.
    Raises: ArenaFull if there is no room for what SGLang will take; LeaseMisuse if the policy's
        memory cannot be mapped by its processes.
    """
    recipe = context.recipe
    if recipe.rollout.engine is EngineName.NATIVE:
        native = NativeEngine(
            model,
            max_slots=recipe.rollout.max_slots,
            # Ranks would see it at different moments, and launch different kernels.
            beside=None if token is None or context.degree > 1 else token.is_taken,
        )
        return native, WindowMemory(context.broker, context.run_id)
    assert context.engine_python is not None, "the controller has looked for it"
    assert isinstance(weights, Storage), "SGLang runs where all services have one rank"
    config = recipe.rollout.sglang or SglangConfig()
    text = text_config(shape.config)
    settings = _settings(context, config)
    token_bytes = 2 * text.num_key_value_heads * head_dim(shape.config) * context.dtype.itemsize
    kv_bytes = settings.kv_tokens * text.num_hidden_layers * token_bytes
    shared = None
    lasting_bytes = 0 if config.release_memory else kv_bytes
    if config.weights == "copy":
        lasting_bytes += shape.layout.total_elements * context.dtype.itemsize
    memory = WindowMemory(
        context.broker,
        context.run_id,
        name=RESERVATION,
        lasting_bytes=lasting_bytes,
        window_bytes=kv_bytes if config.release_memory else 0,
    )
    await memory.take(timeout_s=HOLD_TIMEOUT_S)
    if config.weights == "alias":
        shared = await context.broker.share_storage(context.run_id, weights.name)
    engine = SglangEngine(
        context.engine_python,
        config,
        settings,
        OfferedWeights(
            layout=shape.layout,
            flat=tensor_view(weights, FLAT),
            tensor=FLAT,
            shared=shared,
            bucket_bytes=config.bucket_mib << 20,
        ),
        folder=context.run_dir,
        kv_bytes=kv_bytes,
    )
    return engine, memory


def _settings(context: RunContext, config: SglangConfig) -> EngineSettings:
    recipe = context.recipe
    return EngineSettings(
        model_path=str(recipe.model.path),
        device=context.device.type,
        gpu=context.device.index or 0,
        dtype=recipe.model.dtype,
        seed=recipe.seed,
        max_requests=recipe.rollout.max_slots,
        context_tokens=_context_tokens(recipe),
        kv_tokens=config.kv_tokens or _kv_tokens(recipe),
        memory_fraction=config.memory_fraction,
        release_memory=config.release_memory,
        deterministic=config.deterministic,
        arguments=config.arguments,
    )


def _context_tokens(recipe: Recipe) -> int:
    """Of the longest prompt and response, and what SGLang keeps free itself."""
    return recipe.data.max_prompt_tokens + recipe.rollout.max_new_tokens + _SPARE_TOKENS


def _kv_tokens(recipe: Recipe) -> int:
    """For `max_slots` full responses, and the longest prompt once a group of them."""
    rollout = recipe.rollout
    groups = rollout.max_slots // rollout.samples_per_group
    responses = rollout.max_slots * (rollout.max_new_tokens + _SPARE_TOKENS)
    return responses + groups * recipe.data.max_prompt_tokens
