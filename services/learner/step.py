"""One epoch in the learner: loss and backward of each group's responses, then the update."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.events import bodies
from common.events.bodies import ModelRole
from common.ids import GroupId, Service, WeightsVersion
from common.rl.advantages import group_advantages
from common.rl.kl import rewards_with_kl
from common.rl.losses import LossSums, ScoredResponses, policy_loss
from common.step.plan import StepMode
from common.step.tasks import Task
from common.tensors.parts import in_flight_bytes
from common.tensors.spec import Placement
from common.tensors.views import tensor_view
from common.vlm.prefix import PrefixKV
from common.worker.responses import LOGPROBS, PackedResponses, packed_responses
from common.worker.weights import KV
from services.learner.drift import check_drift
from services.learner.update import Update

if TYPE_CHECKING:
    from common.step.view import GroupView
    from common.worker.scope import StepScope
    from services.learner.run import LearnerRun


class LearnerStep:
    """One epoch."""

    def __init__(self, run: LearnerRun, scope: StepScope) -> None:
        self._run = run
        self._scope = scope
        self._accumulating = False
        self._update: Update | None = None
        self._expects = (
            run.context.spills_optimizer
            and run.context.recipe.training.restore_ahead_groups > 0
            and scope.plan.mode is StepMode.TRAIN
            and self._has_room_for_all
        )
        """Whether parts of the optimizer's state are still to be called back ahead."""
        if run.context.spills_optimizer:
            scope.spawn(Task.UPDATE, self._park)

    async def run(self, task: Task, group: GroupId | None, cause_id: str) -> None:
        """Train one group's responses, or update."""
        if task is Task.UPDATE:
            await self._make_update(cause_id)
            return
        assert task is Task.RESPONSE_TRAIN
        assert group is not None
        await self._train(self._scope.view.groups[group], cause_id)

    def forget(self, group: GroupId) -> None:
        """Nothing is kept between tasks."""

    async def advance(self) -> None:
        """Have spilled optimizer state come back beside the last groups' backward."""
        view = self._scope.view
        if self._update is not None:
            self._update.advance()
        if not self._expects or not view.rollout_over:
            return
        left = sum(not group.done for group in view.living)
        if left <= self._run.context.recipe.training.restore_ahead_groups:
            self._expects = False
            for storage in self._run.storages.optimizer:
                storage.prefetch()

    def close(self) -> None:
        """Leave a rollout that waits for a push which will not come."""
        link = self._run.context.push
        trains = self._scope.plan.mode is StepMode.TRAIN
        if link is not None and trains and not self._scope.view.finished:
            link.close()

    @property
    def _has_room_for_all(self) -> bool:
        context = self._run.context
        room_bytes = self._scope.view.lease_room_bytes.get(context.broker.device, 0)
        on_gpu = context.device.type == "cuda"
        reserve_gib = context.recipe.training.graph_reserve_gib if on_gpu else 0.0
        return room_for_all(
            self._run.storages.sizes_bytes,
            room_bytes,
            reserve_bytes=int(reserve_gib * 2**30),
            ranks=context.arena_ranks,
        )

    async def _park(self) -> None:
        """Nobody needs the optimizer's state before the update: its device memory is for others.

        It has left with the last update, but for what an epoch that failed has called back.
        """
        await self._scope.between_jobs(self._run.storages.park)

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
            scope.exclusive(self._run.storages.gradients),
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
            self._run.storages.state.gradients.zero_()
            self._accumulating = True

    # ---------------------------------------------------------------- update

    async def _make_update(self, cause_id: str) -> None:
        """Make the next version of the weights."""
        scope, run = self._scope, self._run
        version = WeightsVersion(scope.view.version + 1)
        async with scope.exclusive(run.storages.gradients):
            self._update = Update(run, scope, version=version)
            made = await self._update.make(accumulated=self._accumulating)
        if not run.context.speaks_for_all:
            return
        body = bodies.WeightsPublished(weights_version=version, metrics=made.metrics)
        await scope.publish(body, span=made.span, cause_id=cause_id)


def room_for_all(
    sizes_bytes: list[int], room_bytes: int, *, reserve_bytes: int, ranks: int
) -> bool:
    """Whether all parts of the optimizer's state may be on the device beside a step's last groups.

    Otherwise they come in the update, a few at a time: what is called back earlier would take
    memory that those groups need.

    Args:
        sizes_bytes: of each part of one rank.
        room_bytes: for leases of all ranks, beside storages and the parts in flight.
        reserve_bytes: of that, to be left for graphs and workspaces.
    """
    beside_bytes = ranks * (sum(sizes_bytes) - in_flight_bytes(sizes_bytes))
    return beside_bytes <= room_bytes - reserve_bytes
