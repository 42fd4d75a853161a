"""The prefix-encoder's part in a run: both models, the data workers, the storages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.data.workers import SamplePool, SampleSource
from common.errors import FailedPrecondition
from common.events.bodies import ModelRole
from common.ids import Epoch, Service, WeightsVersion
from common.step.machine import Lane
from common.step.tasks import Task
from common.tensors.views import tensor_view
from common.vlm.names import VISUAL
from common.weights.binding import views
from common.worker.device import copied_aside
from common.worker.device_memory import device_memory
from common.worker.reference_residency import spilled_bytes
from common.worker.threads import in_thread
from common.worker.weights import (
    FLAT,
    POLICY_GRADIENTS,
    POLICY_WEIGHTS,
    REFERENCE_WEIGHTS,
    ModelShape,
    policy_shape,
    reference_shape,
    shared_model,
)
from common.worker.work import Prepared, ReadWeights
from services.prefix_encoder.admission import kv_admission
from services.prefix_encoder.ahead import AheadStore, LoadedPrompt, sample_key
from services.prefix_encoder.graphs import PrefixGraphs
from services.prefix_encoder.step import PrefixEncoderStep
from services.prefix_encoder.tiers import worth_running

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from common.data.prepared import PreparedSample
    from common.step.machine import Subject
    from common.step.view import StepView
    from common.tensors.storage import Storage
    from common.vlm.model import SplitModel
    from common.vlm.prompt import PromptTensors
    from common.worker.context import RunContext
    from common.worker.scope import StepScope

COMPUTE_ORDER = (
    Task.PREFIX_BACKWARD,
    Task.POLICY_VISION,
    Task.POLICY_PREFIX,
    Task.REFERENCE_PREFIX,
    Task.AHEAD_VISION,
    Task.AHEAD_REFERENCE,
)
"""What others wait for comes first, and what nobody waits for last."""
PREPARE_AHEAD = 4
"""Samples in preparation for each data worker, so that none of them idles."""
OPEN_TIMEOUT_S = 120.0
"""Longest wait for the learner and the reference to create their storages."""


class PrefixEncoderRun:
    """One run in this process."""

    keeps_cache = True
    trouble = ""
    """The next step begins here, with tensors of the same sizes."""

    def __init__(
        self,
        context: RunContext,
        pool: SamplePool | None,
        *,
        policy: ModelShape,
        weights: Storage,
        gradients: Storage,
        reference: ModelShape | None,
        reference_weights: Storage | None,
    ) -> None:
        self.context = context
        self._pool = pool
        self.shape = policy
        self.weights = weights
        self.gradients = gradients
        self.policy = shared_model(context, policy, weights, gradients)
        self.reference_weights = reference_weights
        self.reference: SplitModel | None = None
        self._reference_shape = reference
        if reference is not None and reference_weights is not None:
            self.reference = shared_model(context, reference, reference_weights, None)
        self._vision_shared: bool | None = None
        self._step: PrefixEncoderStep | None = None
        recipe = context.recipe
        self.ahead = AheadStore(
            limit_bytes=recipe.data.ahead_mib << 20,
            reference_limit=recipe.training.ahead_reference_groups,
        )
        leaving_bytes = 0
        if reference is not None and reference_weights is not None and reference_weights.spillable:
            one_rank = spilled_bytes(context, policy.layout, reference.layout)
            leaving_bytes = context.arena_ranks * one_rank
        self.admission = kv_admission(context, policy, spilled_bytes=leaving_bytes)
        self.graphs = PrefixGraphs(
            recipe.training.prefix_graphs,
            reserve_bytes=int(recipe.training.graph_reserve_gib * 2**30),
            memory=lambda: device_memory(context.device),
            give_back=torch.cuda.empty_cache,
            agree=None if context.joined is None else context.joined.agree,
        )
        compute = Lane(
            name="compute",
            tasks=tuple(t for t in COMPUTE_ORDER if t not in self._left_out()),
            collective=True,
            admits=self._admits,
        )
        data = Lane(
            name="data",
            tasks=(Task.PREPARE, Task.AHEAD_PREPARE),
            width=PREPARE_AHEAD * recipe.data.workers,
        )
        self.lanes = (data, compute) if context.leads else (compute,)

    def _left_out(self) -> frozenset[Task]:
        if self.context.degree > 1:
            # They are given up when the window closes, which ranks see at different moments.
            return frozenset({Task.AHEAD_VISION, Task.AHEAD_REFERENCE})
        # The embeddings of a tower that trains are another update's.
        train_vision = self.context.recipe.model.train_vision
        return frozenset({Task.AHEAD_VISION}) if train_vision else frozenset()

    @classmethod
    async def create(cls, context: RunContext) -> PrefixEncoderRun:
        """Attach to the storages; rank 0 starts the data workers."""
        recipe, broker = context.recipe, context.broker
        weights = await broker.open_storage(
            context.run_id, context.storage_name(POLICY_WEIGHTS), timeout_s=OPEN_TIMEOUT_S
        )
        gradients = await broker.open_storage(
            context.run_id, context.storage_name(POLICY_GRADIENTS), timeout_s=OPEN_TIMEOUT_S
        )
        reference = reference_weights = None
        if recipe.needs_reference:
            reference = reference_shape(context)
            reference_weights = await broker.open_storage(
                context.run_id, context.storage_name(REFERENCE_WEIGHTS), timeout_s=OPEN_TIMEOUT_S
            )
        pool = _sample_pool(context) if context.leads else None
        try:
            if pool is not None:
                await pool.start()
            return cls(
                context,
                pool,
                policy=policy_shape(context),
                weights=weights,
                gradients=gradients,
                reference=reference,
                reference_weights=reference_weights,
            )
        except BaseException:
            if pool is not None:
                await pool.close()
            raise

    async def prepare(self) -> Prepared:
        """Nothing to make good: what a step needs, it holds itself."""
        return Prepared()

    def begin(self, scope: StepScope) -> PrefixEncoderStep:
        """Start an epoch."""
        known = [
            planned
            for planned in (*scope.plan.groups, *scope.plan.ahead)
            if planned.replica == self.context.place.replica
        ]
        self.ahead.keep_only({sample_key(planned) for planned in known})
        self.graphs.begin_step()
        self._step = PrefixEncoderStep(self, scope)
        return self._step

    def _admits(self, view: StepView, started: Collection[Subject], wanted: Subject) -> bool:
        """For `Lane.admits`."""
        return self.admission(view, started, wanted) and worth_running(
            view, started, wanted, keeps_graph=self._keeps_graph
        )

    def _keeps_graph(self, tokens: int) -> bool:
        kept = 0 if self._step is None else self._step.kept_graphs
        return self.graphs.may_keep(tokens, kept=kept)

    @property
    def pool(self) -> SamplePool:
        """The data workers, which rank 0 alone has."""
        assert self._pool is not None
        return self._pool

    async def load(self, sample: PreparedSample) -> LoadedPrompt:
        """Copy a sample's prompt to the device."""
        prompt = sample.prompt()
        return LoadedPrompt(
            text=prompt.without_pixels(),
            row_json=sample.row_json,
            prompt=await self.on_device(prompt),
        )

    async def on_device(self, prompt: PromptTensors) -> PromptTensors:
        """The prompt where the models are."""
        device = self.context.device
        return await in_thread(lambda: copied_aside(device, lambda: prompt.to(device)))

    @property
    def one_tower(self) -> bool:
        """Whether a prompt's pixels are read once: by the policy's tower, which is frozen."""
        model = self.context.recipe.model
        return not model.train_vision and (
            self._reference_shape is None or model.reference_path in (None, model.path)
        )

    def vision_is_shared(self) -> bool:
        """Whether both roles' vision towers are frozen and equal, bit for bit.

        Call it in the compute thread, under read holds of both roles' weights; it is worked out
        once, by all ranks at the same place in the order of their collectives.
        """
        if self._vision_shared is None:
            self._vision_shared = self._vision_towers_equal()
        return self._vision_shared

    def _vision_towers_equal(self) -> bool:
        reference = self._reference_shape
        if self.context.recipe.model.train_vision or reference is None:
            return False
        assert self.reference_weights is not None
        if self.context.recipe.model.reference_path in (None, self.context.recipe.model.path):
            return True
        names = [name for name in self.shape.layout.names if name.startswith(VISUAL)]
        others = [name for name in reference.layout.names if name.startswith(VISUAL)]
        if sorted(names) != sorted(others):
            return False
        mine = views(tensor_view(self.weights, FLAT), self.shape.layout, names)
        theirs = views(tensor_view(self.reference_weights, FLAT), reference.layout, names)
        equal = all(torch.equal(mine[name], theirs[name]) for name in names)
        joined = self.context.joined
        return equal if joined is None else joined.agree(equal)

    def read_weights(self) -> tuple[ReadWeights, ...]:
        """The policy's, and the reference's where the run has one."""
        found = [(ModelRole.POLICY, self.weights, self.policy, self.shape)]
        if self.reference is not None:
            assert self.reference_weights is not None
            assert self._reference_shape is not None
            weights, shape = self.reference_weights, self._reference_shape
            found.append((ModelRole.REFERENCE, weights, self.reference, shape))
        return tuple(
            ReadWeights(role=role, storage=storage, model=model, pieces=shape.pieces)
            for role, storage, model, shape in found
        )

    async def save_checkpoint(self, epoch: Epoch) -> tuple[Path, WeightsVersion]:
        """The prefix-encoder has nothing to save."""
        raise FailedPrecondition(f"{Service.PREFIX_ENCODER} writes no checkpoints; ask the learner")

    async def close(self) -> None:
        """Stop the data workers, drop the mappings and what was kept for the next step."""
        self.ahead.clear()
        if self._pool is not None:
            await self._pool.close()
        for storage in (self.weights, self.gradients, self.reference_weights):
            if storage is not None:
                storage.close()


def _sample_pool(context: RunContext) -> SamplePool:
    data = context.recipe.data
    source = SampleSource.from_config(
        str(context.recipe.model.path), data, bfloat16_pixels=context.dtype is torch.bfloat16
    )
    return SamplePool(source, workers=data.workers, cache_bytes=data.cache_mib << 20)
