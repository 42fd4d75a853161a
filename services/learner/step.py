"""One epoch in the learner: loss and backward of each group's responses, then the update."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.events import bodies
from common.events.bodies import ModelRole
from common.ids import GroupId, Service, WeightsVersion
from common.registry.runs import DurableRecord
from common.rl.advantages import group_advantages
from common.rl.kl import rewards_with_kl
from common.rl.losses import LossSums, ScoredResponses, policy_loss
from common.rl.lr import learning_rate
from common.rl.optimizer import FlatAdamW, UpdateReport, apply_update
from common.step.plan import StepMode
from common.step.tasks import Task
from common.tensors.spec import Placement
from common.tensors.views import tensor_view
from common.vlm.prefix import PrefixKV
from common.worker.responses import LOGPROBS, PackedResponses, packed_responses
from common.worker.weights import KV
from services.learner.drift import check_drift
from services.learner.errors import TooManyNonFinite
from services.learner.step_metrics import step_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.step.view import GroupView
    from common.worker.scope import StepScope
    from services.learner.run import LearnerRun


class LearnerStep:
    """One epoch."""

    def __init__(self, run: LearnerRun, scope: StepScope) -> None:
        self._run = run
        self._scope = scope
        self._accumulating = False
        spills = run.context.spills_optimizer
        self._prefetched = not spills or scope.plan.mode is not StepMode.TRAIN
        if spills:
            scope.spawn(Task.UPDATE, self._park)

    async def run(self, task: Task, group: GroupId | None, cause_id: str) -> None:
        """Train one group's responses, or update."""
        if task is Task.UPDATE:
            await self._update(cause_id)
            return
        assert task is Task.RESPONSE_TRAIN
        assert group is not None
        await self._train(self._scope.view.groups[group], cause_id)

    def forget(self, group: GroupId) -> None:
        """Nothing is kept between tasks."""

    async def advance(self) -> None:
        """Have spilled optimizer state come back beside the last groups' backward."""
        view = self._scope.view
        if self._prefetched or not view.rollout_over:
            return
        left = sum(not group.done for group in view.living)
        if left <= self._run.context.recipe.training.restore_ahead_groups:
            self._prefetched = True
            self._run.optimizer.prefetch()

    def close(self) -> None:
        """Nothing is kept between tasks."""

    async def _park(self) -> None:
        """Nobody needs the optimizer's state before the update: its device memory is for others."""
        await self._scope.between_jobs(self._run.optimizer.park)

    # ---------------------------------------------------------------- one group

    async def _train(self, state: GroupView, cause_id: str) -> None:
        scope, group = self._scope, state.group
        assert state.generated is not None
        assert state.generated.lease is not None
        wanted = [state.prefixes[ModelRole.POLICY].lease, state.generated.lease]
        if state.scored is not None:
            wanted.append(state.scored.lease)
        leases = await scope.acquire(*wanted)
        buffer = tensor_view(leases[0], KV)
        responses = packed_responses(leases[1])
        reference_T = tensor_view(leases[2], LOGPROBS) if state.scored is not None else None
        advantages_G = self._advantages(state, responses, reference_T)
        if self._has_no_gradient(advantages_G):
            sums = LossSums(tokens=float(len(responses.tokens)))
            scope.give_back(*leases)
            body = bodies.ResponsesTrained(lease=None, metrics=sums.as_dict())
            await scope.publish(body, group, cause_id=cause_id)
            return
        shapes = {KV: (self._run.context.accumulator_dtype, tuple(buffer.shape))}
        async with (
            scope.exclusive(self._run.gradients),
            scope.writing(
                "policy.prefix_kv_gradients",
                group,
                shapes,
                consumers=[self._run.context.peer(Service.PREFIX_ENCODER)],
                next_use=Task.PREFIX_BACKWARD,
                placement=Placement.DEVICE,
            ) as draft,
        ):
            gradient = draft.tensors[KV]

            def train() -> LossSums:
                prefix = PrefixKV.leaves(buffer, gradient.zero_())
                return self._backward(state, prefix, responses, advantages_G, reference_T)

            trained = await scope.run(
                Task.RESPONSE_TRAIN,
                train,
                work=len(responses.tokens),
            )
        scope.give_back(*leases)
        body = bodies.ResponsesTrained(lease=draft.lease_id, metrics=trained.value.as_dict())
        await scope.publish(body, group, span=trained.span, cause_id=cause_id)

    def _backward(
        self,
        state: GroupView,
        prefix: PrefixKV,
        responses: PackedResponses,
        advantages_G: torch.Tensor,
        reference_T: torch.Tensor | None,
    ) -> LossSums:
        """Add the group's response part to the accumulator; the prefix's part to its gradients."""
        run, device = self._run, self._run.context.device
        assert state.prepared is not None
        self._zero_once()
        responses = responses.to(device)
        with torch.enable_grad():
            passes = [
                run.model.response_logprobs(
                    last_token=state.prepared.last_token,
                    start_position=state.prepared.start_position,
                    prefix=prefix,
                    tokens_T=tokens_T,
                    lengths_G=lengths_G,
                    temperature=run.context.recipe.rollout.temperature,
                    suppressed=run.shape.suppressed,
                )
                for tokens_T, lengths_G in responses.parts(
                    packed=run.context.recipe.training.share_prefix
                )
            ]
            logprobs_T = passes[0] if len(passes) == 1 else torch.cat(passes)
            batch = ScoredResponses(
                logprobs=logprobs_T,
                lengths=torch.tensor(responses.lengths, dtype=torch.int64, device=device),
                advantages=advantages_G.to(device),
                reference_logprobs=None if reference_T is None else reference_T.to(device),
                engine_logprobs=responses.engine_logprobs,
            )
            loss, sums = policy_loss(batch, run.context.recipe.algorithm)
            check_drift(sums, run.context.recipe.rollout.logprob_bound)
            loss.backward()
        return sums

    def _advantages(
        self, state: GroupView, responses: PackedResponses, reference_T: torch.Tensor | None
    ) -> torch.Tensor:
        """[G] float64."""
        algorithm = self._run.context.recipe.algorithm
        assert state.rewarded is not None
        rewards_G = torch.tensor(state.rewarded.rewards, dtype=torch.float64)
        if algorithm.kl_placement == "reward" and reference_T is not None:
            rewards_G = rewards_with_kl(
                rewards_G,
                responses.engine_logprobs,
                reference_T,
                torch.tensor(responses.lengths, dtype=torch.int64),
                coefficient=algorithm.kl_coefficient,
            )
        return group_advantages(rewards_G, scale_by_std=algorithm.scale_by_std)

    def _has_no_gradient(self, advantages_G: torch.Tensor) -> bool:
        """Whether the loss is constant, so that its backward would add exact zeros."""
        algorithm = self._run.context.recipe.algorithm
        kl_in_loss = algorithm.kl_coefficient > 0 and algorithm.kl_placement == "loss"
        return not kl_in_loss and not bool(advantages_G.any())

    def _zero_once(self) -> None:
        """Start the epoch's accumulation; runs under the exclusive hold."""
        if not self._accumulating:
            self._run.state.gradients.zero_()
            self._accumulating = True

    # ---------------------------------------------------------------- update

    async def _update(self, cause_id: str) -> None:
        """Change the weights, make that durable, publish it: in this order.

        Whatever ends it in between leaves the old version whole, or the storages torn and a
        durable copy that is whole.
        """
        scope, run = self._scope, self._run
        version = WeightsVersion(scope.view.version + 1)
        deadline_s = run.context.recipe.training.step_deadline_s
        async with scope.exclusive(run.gradients):
            rewritings = [
                await scope.write(storage, version, timeout_s=deadline_s)
                for storage in (run.optimizer, run.weights)
            ]

            def apply() -> UpdateReport | None:
                for rewriting in rewritings:
                    rewriting.touch()
                return self._apply(version)

            update = await scope.run(Task.UPDATE, apply)
            metrics = step_metrics(scope.view, update.value)
            await self._make_durable(version, metrics)
            for rewriting in rewritings:
                await rewriting.publish()
            run.published(version)
            scope.give_back(*rewritings)
        body = bodies.WeightsPublished(weights_version=version, metrics=metrics)
        await scope.publish(body, span=update.span, cause_id=cause_id)

    def _apply(self, version: WeightsVersion) -> UpdateReport | None:
        """Change the weights in place. None: no group of this step had a gradient."""
        run, algorithm = self._run, self._run.context.recipe.algorithm
        report: UpdateReport | None = None
        if self._accumulating:
            state = run.state
            optimizer = FlatAdamW(
                state.masters,
                state.moments,
                decay_elements=state.layout.decay_elements,
                version=version - 1,
                config=algorithm,
            )
            report = apply_update(
                optimizer,
                state.gradients,
                tokens=self._scope.view.response_tokens,
                max_norm=algorithm.max_grad_norm,
                learning_rate=learning_rate(
                    version - 1, run.context.recipe.training.steps, algorithm
                ),
            )
            state.weights_from_masters()
        self._count_nonfinite(report)
        if run.context.recipe.training.host_shadow:
            run.shadow.save(version)
        return report

    def _count_nonfinite(self, report: UpdateReport | None) -> None:
        run, limit = self._run, self._run.context.recipe.algorithm.nonfinite_limit
        if report is None or report.applied:
            run.nonfinite_in_a_row = 0
            return
        run.nonfinite_in_a_row += 1
        if run.nonfinite_in_a_row >= limit:
            raise TooManyNonFinite(
                f"the gradient was NaN or infinite in {limit} steps in a row "
                "(algorithm.nonfinite_limit)"
            )

    async def _make_durable(self, version: WeightsVersion, metrics: Mapping[str, float]) -> None:
        run = self._run
        if not run.context.recipe.training.host_shadow:
            return
        record = DurableRecord(
            kind="shadow",
            version=version,
            location=run.shadow.slot_name(version),
            epoch=self._scope.plan.epoch,
            metrics=metrics,
        )
        await run.context.ledger.commit_durable(run.context.run_id, record)
