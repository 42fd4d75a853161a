"""The engine that a recipe names, for one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.config.recipe import EngineName
from common.tensors.storage import Storage
from services.rollout.engines.native import NativeEngine
from services.rollout.engines.sglang.make import make_sglang
from services.rollout.window_memory import WindowMemory

if TYPE_CHECKING:
    from common.vlm.model import SplitModel
    from common.worker.context import RunContext
    from common.worker.sm_token import SmToken
    from common.worker.weights import ModelShape
    from services.rollout.engines.protocol import Engine
    from services.rollout.resharded import ReshardedWeights


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
    assert isinstance(weights, Storage), "SGLang runs at equal degrees"
    return await make_sglang(context, shape=shape, weights=weights)
