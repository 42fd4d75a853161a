"""The rollout's part in a run: engine, tokenizer, reward workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common.errors import FailedPrecondition
from common.events.bodies import ModelRole
from common.ids import Epoch, Service, WeightsVersion
from common.step.machine import Lane
from common.step.tasks import Task
from common.worker.live_decode import LiveDecode
from common.worker.scope import HOLD_TIMEOUT_S
from common.worker.sm_token import SmToken
from common.worker.threads import in_thread
from common.worker.weights import (
    ModelShape,
    policy_shape,
    resharded_model,
    rollout_reads,
    shared_model,
)
from common.worker.work import Prepared, ReadWeights
from services.rollout.engines.choice import make_engine
from services.rollout.own_weights import OwnWeights
from services.rollout.resharded import OPEN_TIMEOUT_S, ReshardedWeights
from services.rollout.rewards.pool import RewardPool
from services.rollout.step import RolloutStep
from services.rollout.stop_tokens import stop_token_ids

if TYPE_CHECKING:
    from pathlib import Path

    from common.tensors.storage import Storage
    from common.vlm.model import SplitModel
    from common.worker.context import RunContext
    from common.worker.scope import StepScope
    from services.rollout.engines.protocol import Engine
    from services.rollout.window_memory import WindowMemory

UNBOUNDED = 1 << 30
"""Width of lanes whose own limit lies elsewhere: the engine's slots, the reward pool's queue."""


class RolloutRun:
    """One run in this process."""

    keeps_cache = False

    def __init__(
        self,
        context: RunContext,
        *,
        weights: Storage | ReshardedWeights,
        shape: ModelShape,
        model: SplitModel,
        engine: Engine,
        memory: WindowMemory,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: tuple[int, ...],
        rewards: RewardPool,
        live: LiveDecode,
        token: SmToken | None,
        own: OwnWeights | None,
    ) -> None:
        """Args: own: `weights`, where they are no storage of the learner's."""
        self.context = context
        self.weights = weights
        self.own = own
        self.shape = shape
        self.model = model
        self.engine = engine
        self.memory = memory
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.rewards = rewards
        self.live = live
        self.gate_passed = context.recipe.rollout.logprob_bound is None
        """Whether the engine was held against the trainer's pass, or need not be."""
        self._token = token

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """What the engine does follows from the step's groups alone, so it needs no commands."""
        engine = Lane(name="engine", tasks=(Task.DECODE,), width=UNBOUNDED, strict=True)
        if not self.context.leads:
            return (engine,)
        return (engine, Lane(name="reward", tasks=(Task.REWARD,), width=UNBOUNDED))

    @classmethod
    async def create(cls, context: RunContext) -> RolloutRun:
        """Attach to the policy's weights, or make a copy; rank 0 starts the reward workers."""
        rewards = RewardPool(context.recipe.reward)
        try:
            if context.leads:
                await rewards.start()
            return await cls._load(context, rewards)
        except BaseException:
            await rewards.close()
            raise

    @classmethod
    async def _load(cls, context: RunContext, rewards: RewardPool) -> RolloutRun:
        recipe, shape = context.recipe, policy_shape(context)
        weights, model, own = await _policy(context, shape)
        tokenizer = await in_thread(
            lambda: AutoTokenizer.from_pretrained(recipe.model.path, local_files_only=True)
        )
        governed = context.governed and context.leads
        token = await SmToken.open(context) if governed else None
        engine, memory = await make_engine(
            context, shape=shape, weights=weights, model=model, token=token
        )
        return cls(
            context,
            weights=weights,
            shape=shape,
            model=model,
            engine=engine,
            memory=memory,
            tokenizer=tokenizer,
            stop_ids=stop_token_ids(tokenizer, shape.config, recipe.rollout.stop),
            rewards=rewards,
            live=await LiveDecode.open(context) if governed else LiveDecode.private(),
            token=token,
            own=own,
        )

    @property
    def trouble(self) -> str:
        """The engine's."""
        return self.engine.trouble

    async def prepare(self) -> Prepared:
        """Have the weights that the learner has, and the engine up.

        The engine has its memory for keys and values at its start.
        """
        if self.own is not None:
            await self.own.catch_up()
        if isinstance(self.weights, ReshardedWeights):
            self.weights.forget()
        try:
            await self.memory.take(timeout_s=HOLD_TIMEOUT_S)
            await in_thread(self.engine.prepare)
        finally:
            self.memory.release()
        return Prepared()

    def begin(self, scope: StepScope) -> RolloutStep:
        """Start an epoch."""
        return RolloutStep(self, scope)

    def read_weights(self) -> tuple[ReadWeights, ...]:
        """The policy's, as the engine reads them."""
        return (
            ReadWeights(
                role=ModelRole.POLICY,
                storage=self.weights,
                model=self.model,
                pieces=self.shape.pieces,
            ),
        )

    async def save_checkpoint(self, epoch: Epoch) -> tuple[Path, WeightsVersion]:
        """The rollout has nothing to save."""
        raise FailedPrecondition(f"{Service.ROLLOUT} writes no checkpoints; ask the learner")

    async def close(self) -> None:
        """Stop the reward workers and the engine, drop the mappings."""
        await self.rewards.close()
        self.live.close()
        await in_thread(self.engine.close)
        if self._token is not None:
            self._token.close()
        self.weights.close()


async def _policy(
    context: RunContext, shape: ModelShape
) -> tuple[Storage | ReshardedWeights, SplitModel, OwnWeights | None]:
    """The policy's weights as this rank reads them, and the model whose parameters they are.

    Returns: and the first once more where they are no storage of the learner's.
    """
    if context.push is not None:
        storage, own = await OwnWeights.open(context, shape.layout)
        return storage, shared_model(context, shape, storage, None), own
    if context.degree != context.partners.count(Service.LEARNER):
        resharded = await ReshardedWeights.open(context, shape)
        return resharded, resharded_model(context, shape, resharded.tensors), None
    name = rollout_reads(context, context.participant)
    storage = await context.broker.open_storage(context.run_id, name, timeout_s=OPEN_TIMEOUT_S)
    return storage, shared_model(context, shape, storage, None), None
