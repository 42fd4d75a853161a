"""The update of one epoch: gradients first, then part after part of the optimizer's state.

It is the one place where replicas meet: each sums its share of all their gradients, updates that
share of the weights, and gets the others' shares of the new ones.

Order: change, make durable, publish. The weights are held from before the first change until the
new version is durable. The parts are published one by one as they are changed, so that each can
leave the device while the next ones are updated: nobody but the learner reads them. Whatever ends
the update before its first change leaves the old version whole; later, the weights are torn, and a
durable copy is whole. A rollout with weights of its own gets the buckets of them as they are made,
which with several replicas is when all shares are there, and can read the version before the step
ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from common.registry.runs import DurableRecord
from common.rl.lr import learning_rate
from common.rl.optimizer import FlatAdamW, global_norm, ready_gradients
from common.step.tasks import Task
from common.tensors.parts import PARTS_IN_FLIGHT
from services.learner.nonfinite import NONFINITE, nonfinite_after
from services.learner.push import Pushed, WeightsPush, push_metrics
from services.learner.step_metrics import step_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.events import WorkSpan
    from common.ids import WeightsVersion
    from common.rl.config import AlgorithmConfig
    from common.rl.optimizer import UpdateReport
    from common.tensors.storage import Storage
    from common.worker.scope import Rewriting, StepScope
    from services.learner.replicas import Replicas
    from services.learner.run import LearnerRun
    from services.learner.training_state import StatePart, TrainingState

COMING = PARTS_IN_FLIGHT - 2
"""Parts that come while one is held and the one before leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A version that was published.

    Attributes:
        metrics: of the step.
        span: from the first job of the update to the last one.
    """

    metrics: Mapping[str, float]
    span: WorkSpan


class Update:
    """See the module's text."""

    def __init__(self, run: LearnerRun, scope: StepScope, *, version: WeightsVersion) -> None:
        """Args: version: the one to be made."""
        self._run = run
        self._scope = scope
        self._version = version
        self._timeout_s = run.context.recipe.training.step_deadline_s
        self._push: WeightsPush | None = None
        self._nonfinite = 0

    def advance(self) -> None:
        """An event was folded into the view."""
        if self._push is not None:
            self._push.advance()

    async def make(self, *, accumulated: bool) -> Made:
        """Update weights and optimizer state from the accumulator, which the caller holds.

        Args: accumulated: whether any group of this replica had a gradient.
        """
        run, scope = self._run, self._scope
        self._expect(range(1))
        weights = await scope.write(run.storages.weights, self._version, timeout_s=self._timeout_s)
        ready = await scope.run(Task.UPDATE, partial(self._ready, accumulated=accumulated))
        report = ready.value
        applied = report if report is not None and report.applied else None
        end_ns = ready.span.end_ns
        await self._begin_push(applied)
        for number, (storage, part) in enumerate(run.storages.parts()):
            end_ns = await self._rewrite(number, storage, part, applied, weights)
        if run.replicas is not None and applied is not None:
            gathered = await scope.run(Task.UPDATE, partial(self._gather, run.replicas, weights))
            end_ns = gathered.span.end_ns
            if self._push is not None:
                self._push.made(run.storages.state.layout.trainable_elements)
        metrics = step_metrics(scope.view, report) | {NONFINITE: float(self._nonfinite)}
        if run.context.recipe.training.host_shadow:
            await scope.between_jobs(partial(run.shadow.finish, self._version))
        if self._push is not None:
            metrics |= await self._pushed(self._push)
        # A version is durable once every rank has saved it,
        await self._meet()
        if run.context.speaks_for_all:
            await self._make_durable(metrics)
        # is published once it is durable,
        await self._meet()
        await weights.publish()
        run.published(self._version, nonfinite=self._nonfinite)
        # and the step ends once it is readable on all of them.
        await self._meet()
        scope.give_back(weights)
        return Made(metrics=metrics, span=replace(ready.span, end_ns=end_ns))

    async def _rewrite(
        self,
        number: int,
        storage: Storage,
        part: StatePart,
        applied: UpdateReport | None,
        weights: Rewriting,
    ) -> int:
        """Make one part's new version and let it go. Returns: when its job ended, in ns."""
        run, scope = self._run, self._scope
        shadowed = run.context.recipe.training.host_shadow
        rewriting = await scope.write(storage, self._version, timeout_s=self._timeout_s)
        self._expect(range(number + 1, number + 1 + COMING))

        def apply() -> None:
            weights.touch()
            rewriting.touch()
            if applied is not None:
                update_part(
                    run.storages.state,
                    part,
                    version=self._version - 1,
                    learning_rate=applied.learning_rate,
                    config=run.context.recipe.algorithm,
                )
            if shadowed and number == 0:
                run.shadow.begin(self._version)
            if shadowed:
                run.shadow.save(part)

        done = await scope.run(Task.UPDATE, apply)
        if self._push is not None and run.replicas is None:
            self._push.made(part.elements.stop)
        await rewriting.publish()
        scope.give_back(rewriting)
        if run.context.spills_optimizer:
            await scope.between_jobs(storage.park)
        return done.span.end_ns

    async def _begin_push(self, applied: UpdateReport | None) -> None:
        """Where the rollout has weights of its own: of those that change, if any do."""
        run, link = self._run, self._run.context.push
        if link is None:
            return
        state = run.storages.state
        elements = 0 if applied is None else state.layout.trainable_elements
        weights = state.weights[:elements]
        self._push = WeightsPush(self._scope, link, version=self._version, weights=weights)
        await self._push.begin()

    async def _pushed(self, push: WeightsPush) -> Mapping[str, float]:
        """The push's part of the metrics, of all ranks."""
        own, joined = await push.end(), self._run.context.joined
        if joined is None:
            return push_metrics([own])
        everyones = await self._scope.between_jobs(partial(joined.everyones, own))
        return push_metrics([Pushed(*one) for one in everyones])

    async def _meet(self) -> None:
        """Wait for the other ranks."""
        joined = self._run.context.joined
        if joined is not None:
            await self._scope.between_jobs(joined.meet)

    def _gather(self, replicas: Replicas, weights: Rewriting) -> None:
        """Get the other replicas' shares of the new weights."""
        weights.touch()
        replicas.gather(self._run.storages.state.trainable_weights)

    def _expect(self, numbers: range) -> None:
        """Have spilled parts come back; those that are there stay."""
        for storage in self._run.storages.optimizer[numbers.start : numbers.stop]:
            storage.prefetch()

    def _ready(self, *, accumulated: bool) -> UpdateReport | None:
        """Sum, normalise and clip the gradients. None: no group of any replica had one."""
        run, algorithm = self._run, self._run.context.recipe.algorithm
        report: UpdateReport | None = None
        if self._scope.view.has_gradient:
            gradients = run.storages.state.gradients
            if not accumulated:
                gradients.zero_()
            if run.replicas is not None:
                gradients = run.replicas.reduce(gradients)
            report = ready_gradients(
                gradients,
                tokens=self._scope.view.response_tokens,
                max_norm=algorithm.max_grad_norm,
                learning_rate=learning_rate(
                    self._version - 1, run.context.recipe.training.steps, algorithm
                ),
                norm_of=global_norm if run.sharding is None else run.sharding.norm,
            )
        self._nonfinite = nonfinite_after(report, run.nonfinite, limit=algorithm.nonfinite_limit)
        return report

    async def _make_durable(self, metrics: Mapping[str, float]) -> None:
        run = self._run
        if not run.context.recipe.training.host_shadow:
            return
        record = DurableRecord(
            kind="shadow",
            version=self._version,
            location=run.shadow.slot_name(self._version),
            epoch=self._scope.plan.epoch,
            metrics=metrics,
        )
        await run.context.ledger.commit_durable(run.context.run_id, record)


def update_part(
    state: TrainingState,
    part: StatePart,
    *,
    version: int,
    learning_rate: float,
    config: AlgorithmConfig,
) -> None:
    """One step of the optimizer on a part of a state, and its compute weights.

    Args:
        state: its gradients are ready to be applied; they are only read.
        version: of the weights before.
        learning_rate, config: as for `FlatAdamW`.
    Sync: none.
    """
    elements = part.elements
    decay_elements = min(state.layout.decay_elements, elements.stop) - elements.start
    optimizer = FlatAdamW(
        part.masters,
        part.moments,
        decay_elements=max(0, decay_elements),
        version=version,
        config=config,
    )
    optimizer.step(state.gradients[elements], learning_rate=learning_rate)
    part.cast()
