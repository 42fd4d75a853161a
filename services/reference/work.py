"""The reference's work: log-probabilities of the responses under the reference weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.errors import FailedPrecondition
from common.events import bodies
from common.events.bodies import ModelRole
from common.ids import Epoch, GroupId, Service, WeightsVersion
from common.step.machine import Lane
from common.step.tasks import Task
from common.tensors.spec import Placement
from common.tensors.views import tensor_view
from common.vlm.prefix import PrefixKV
from common.worker.device import wait_for
from common.worker.reference import ReferenceWeights
from common.worker.reference_residency import reference_residency
from common.worker.responses import LOGPROBS, packed_responses
from common.worker.threads import in_thread
from common.worker.weights import (
    KV,
    REFERENCE_VERSION,
    REFERENCE_WEIGHTS,
    ModelShape,
    first_weights,
    flat_spec,
    reference_shape,
    shared_model,
    shared_tensors,
)
from common.worker.work import Prepared, ReadWeights

if TYPE_CHECKING:
    from pathlib import Path

    from common.tensors.storage import Storage
    from common.vlm.model import SplitModel
    from common.worker.context import RunContext
    from common.worker.scope import StepScope


class ReferenceRun:
    """One run in this process."""

    keeps_cache = False
    trouble = ""
    lanes = (Lane(name="compute", tasks=(Task.REFERENCE_SCORE,), collective=True),)

    def __init__(self, context: RunContext, shape: ModelShape, weights: Storage | None) -> None:
        self.context = context
        self.shape = shape
        self.weights = weights
        self.model: SplitModel | None = None

    @classmethod
    async def create(cls, context: RunContext) -> ReferenceRun:
        """Open the storage of the reference weights, if the algorithm needs a reference."""
        shape = reference_shape(context)
        weights = None
        if context.recipe.needs_reference:
            me = context.participant
            spec = flat_spec(
                shape.layout.total_elements,
                context.dtype,
                readers=(me, context.peer(Service.PREFIX_ENCODER)),
                writers=(me,),
                residency=reference_residency(context, shape.layout),
            )
            weights = await context.broker.open_storage(
                context.run_id, context.storage_name(REFERENCE_WEIGHTS), create=spec
            )
        return cls(context, shape, weights)

    async def prepare(self) -> Prepared:
        """Load and publish the weights unless the storage has them."""
        if self.weights is None:
            return Prepared(facts={"reference": "not needed"})
        if self.weights.version is None or self.weights.torn:
            hold = await self.weights.hold_write(REFERENCE_VERSION)
            model = self.context.recipe.model
            tensors = shared_tensors(self.shape, self.weights)

            def load() -> None:
                path = model.reference_path or model.path
                first_weights(self.context, path, self.shape, tensors)
                wait_for(self.context.device)

            with hold:
                await in_thread(load)
                await hold.publish()
        if self.model is None:
            self.model = shared_model(self.context, self.shape, self.weights, None)
        return Prepared(
            facts={
                "parameters": str(self.shape.layout.total_elements),
                "spillable": str(self.weights.spillable).lower(),
            }
        )

    def begin(self, scope: StepScope) -> ReferenceStep:
        """Start an epoch."""
        return ReferenceStep(self, scope)

    def read_weights(self) -> tuple[ReadWeights, ...]:
        """The reference's, where the run has one."""
        if self.model is None or self.weights is None:
            return ()
        return (
            ReadWeights(
                role=ModelRole.REFERENCE,
                storage=self.weights,
                model=self.model,
                pieces=self.shape.pieces,
            ),
        )

    async def save_checkpoint(self, epoch: Epoch) -> tuple[Path, WeightsVersion]:
        """The reference has nothing to save."""
        raise FailedPrecondition("the reference writes no checkpoints; ask the learner")

    async def close(self) -> None:
        """Drop the model and the mapping."""
        self.model = None
        if self.weights is not None:
            self.weights.close()


class ReferenceStep:
    """One epoch."""

    def __init__(self, run: ReferenceRun, scope: StepScope) -> None:
        self._run = run
        self._scope = scope
        self.weights = ReferenceWeights(scope, run.weights, task=Task.REFERENCE_SCORE)

    async def run(self, task: Task, group: GroupId | None, cause_id: str) -> None:
        """Score one group."""
        assert task is Task.REFERENCE_SCORE
        assert group is not None
        scope = self._scope
        state = scope.view.groups[group]
        assert state.prepared is not None
        assert state.generated is not None
        assert state.generated.lease is not None
        prefix_lease = state.prefixes[ModelRole.REFERENCE].lease
        leases = await scope.acquire(prefix_lease, state.generated.lease)
        prefix = PrefixKV.unpack(tensor_view(leases[0], KV))
        packed = packed_responses(leases[1])
        prompt, recipe = state.prepared, self._run.context.recipe

        def score() -> torch.Tensor:
            model = self._run.model
            assert model is not None
            responses = packed.to(self._run.context.device)
            with torch.no_grad():
                passes = [
                    model.response_logprobs(
                        last_token=prompt.last_token,
                        start_position=prompt.start_position,
                        prefix=prefix,
                        tokens_T=tokens_T,
                        lengths_G=lengths_G,
                        temperature=recipe.rollout.temperature,
                        suppressed=self._run.shape.suppressed,
                    )
                    for tokens_T, lengths_G in responses.parts(packed=recipe.training.share_prefix)
                ]
            return torch.cat(passes)

        async with self.weights.reading():
            scored = await scope.run(task, score, work=len(packed.tokens))
        lease = await scope.produce(
            "reference.scores",
            group,
            {LOGPROBS: (scored.value.dtype, tuple(scored.value.shape))},
            lambda out: out[LOGPROBS].copy_(scored.value),
            consumers=[self._run.context.peer(Service.LEARNER)],
            next_use=Task.RESPONSE_TRAIN,
            placement=Placement.HOST,
        )
        scope.give_back(*leases)
        await scope.publish(
            bodies.GroupScored(lease=lease), group, span=scored.span, cause_id=cause_id
        )

    def forget(self, group: GroupId) -> None:
        """Nothing is kept between tasks."""

    async def advance(self) -> None:
        """Let the weights go once every group is scored."""
        self.weights.advance()

    def close(self) -> None:
        """Nothing is kept between tasks."""
