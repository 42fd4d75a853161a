"""One epoch in the prefix-encoder: prompts, vision, prefixes of both roles, prefix backward.

A group's policy graph lives from its prefix forward to its prefix backward in this process; what
leaves it are copies of K and V, and what comes back are their gradients.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from common.data.errors import SampleError
from common.events import WorkSpan, bodies
from common.events.bodies import ModelRole
from common.gpu.backward import backward_on_current_stream
from common.ids import GroupId, LeaseId, Participant, Service
from common.step.plan import StepMode
from common.step.schedule import PREFILL_FROM_LEASE
from common.step.tasks import Task
from common.tensors.spec import Placement
from common.tensors.views import tensor_view
from common.vlm.prefix import PrefixKV, prefix_backward
from common.worker.device import copied_aside
from common.worker.prompts import EMBEDDINGS, prompt_tensors
from common.worker.threads import in_thread
from common.worker.weights import KV, REFERENCE_VERSION

if TYPE_CHECKING:
    from common.tensors.storage import Hold
    from common.vlm.prompt import PromptTensors
    from common.worker.scope import StepScope
    from services.prefix_encoder.run import PrefixEncoderRun


@dataclass(slots=True)
class GroupWork:
    """What this process keeps of one group."""

    prompt: PromptTensors
    vision: torch.Tensor | None = None
    """[V, h]; with its graph where the tower trains."""
    policy: PrefixKV | None = None
    """With its graph, until its backward; None: not encoded yet, or to be encoded again."""


class PrefixEncoderStep:
    """One epoch."""

    def __init__(self, run: PrefixEncoderRun, scope: StepScope) -> None:
        self._run = run
        self._scope = scope
        self._groups: dict[GroupId, GroupWork] = {}
        self._policy_hold: Hold | None = None
        self._reference_hold: Hold | None = None
        self._training = scope.plan.mode is StepMode.TRAIN

    async def run(self, task: Task, group: GroupId | None, cause_id: str) -> None:
        """Do one task of one group."""
        assert group is not None
        match task:
            case Task.PREPARE:
                await self._prepare(group, cause_id)
            case Task.POLICY_VISION:
                await self._policy_vision(group, cause_id)
            case Task.POLICY_PREFIX:
                await self._policy_prefix(group, cause_id)
            case Task.REFERENCE_PREFIX:
                await self._reference_prefix(group, cause_id)
            case Task.PREFIX_BACKWARD:
                await self._prefix_backward(group, cause_id)
            case _:
                raise AssertionError(f"{task} is not the prefix-encoder's")

    def forget(self, group: GroupId) -> None:
        """Drop the group's tensors and graph."""
        self._groups.pop(group, None)

    async def advance(self) -> None:
        """Let the update begin once every living group is accumulated."""
        if self._policy_hold is not None and self._scope.view.accumulated:
            self._scope.give_back(self._policy_hold)
            self._policy_hold = None

    def close(self) -> None:
        """Drop every graph."""
        self._groups.clear()

    # ---------------------------------------------------------------- tasks

    async def _prepare(self, group: GroupId, cause_id: str) -> None:
        scope = self._scope
        planned = scope.view.groups[group]
        start_ns = time.monotonic_ns()
        try:
            sample = await self._run.pool.prepare(planned.split, planned.sample)
        except SampleError as error:
            dropped = bodies.GroupDropped(
                code=error.fault.value, reason=str(error), sample=planned.sample
            )
            await scope.publish(dropped, group, cause_id=cause_id)
            return
        prompt = sample.prompt()
        shapes, fill = prompt_tensors(prompt, sample.row_json)
        lease = await scope.produce(
            "prompt",
            group,
            shapes,
            fill,
            consumers=[self._peer(Service.ROLLOUT)],
            next_use=Task.DECODE,
            placement=Placement.HOST,
        )
        device = self._run.context.device
        on_device = await in_thread(lambda: copied_aside(device, lambda: prompt.to(device)))
        self._groups[group] = GroupWork(on_device)
        prepared = bodies.GroupPrepared(
            prompt_lease=lease,
            prompt_tokens=prompt.prefix_tokens + 1,
            vision_tokens=prompt.vision_tokens,
            last_token=prompt.last_token,
            start_position=prompt.start_position,
        )
        span = WorkSpan(task=Task.PREPARE, start_ns=start_ns, end_ns=time.monotonic_ns())
        await scope.publish(prepared, group, span=span, cause_id=cause_id)

    async def _policy_vision(self, group: GroupId, cause_id: str) -> None:
        scope, work = self._scope, self._groups[group]
        await self._hold_policy()

        def encode() -> torch.Tensor:
            with torch.set_grad_enabled(self._training):
                return self._run.policy.vision_embeddings(
                    work.prompt, checkpointing=self._checkpointing
                )

        encoded = await scope.run(Task.POLICY_VISION, encode)
        work.vision = encoded.value
        detached = encoded.value.detach()
        lease: LeaseId | None = None
        if scope.plan.schedule not in PREFILL_FROM_LEASE and detached.shape[0]:
            lease = await scope.produce(
                "policy.vision",
                group,
                {EMBEDDINGS: (detached.dtype, tuple(detached.shape))},
                lambda out: out[EMBEDDINGS].copy_(detached),
                consumers=[self._peer(Service.ROLLOUT)],
                next_use=Task.DECODE,
                placement=Placement.DEVICE,
            )
        body = bodies.PolicyVisionEncoded(lease=lease, weights_version=scope.view.version)
        await scope.publish(body, group, span=encoded.span, cause_id=cause_id)

    async def _policy_prefix(self, group: GroupId, cause_id: str) -> None:
        scope, work = self._scope, self._groups[group]
        await self._hold_policy()
        vision = work.vision
        assert vision is not None

        keep = self._may_keep_graph()
        encoded = await scope.run(
            Task.POLICY_PREFIX, lambda: self._encode_policy(work.prompt, vision, with_graph=keep)
        )
        work.policy = encoded.value if keep else None
        consumers = [self._peer(Service.LEARNER)]
        if scope.plan.schedule in PREFILL_FROM_LEASE:
            consumers.append(self._peer(Service.ROLLOUT))
        await self._export(
            group, ModelRole.POLICY, encoded.value, consumers, encoded.span, cause_id
        )

    async def _reference_prefix(self, group: GroupId, cause_id: str) -> None:
        scope, work = self._scope, self._groups[group]
        await self._hold_policy()
        await self._hold_reference()
        model = self._run.reference
        assert model is not None

        def encode() -> PrefixKV:
            with torch.no_grad():
                if self._run.vision_is_shared():
                    assert work.vision is not None
                    vision = work.vision.detach()
                else:
                    vision = model.vision_embeddings(work.prompt)
                for _ in range(self._passes - 1):
                    model.prefix_kv(work.prompt, vision)
                return model.prefix_kv(work.prompt, vision)

        encoded = await scope.run(Task.REFERENCE_PREFIX, encode)
        consumers = [self._peer(Service.REFERENCE)]
        await self._export(
            group, ModelRole.REFERENCE, encoded.value, consumers, encoded.span, cause_id
        )

    async def _prefix_backward(self, group: GroupId, cause_id: str) -> None:
        scope = self._scope
        trained = scope.view.groups[group].trained
        work = self._groups.pop(group)
        assert trained is not None
        span: WorkSpan | None = None
        if trained.lease is not None:
            prompt, vision = work.prompt, work.vision
            assert vision is not None
            kept, work.policy = work.policy, None
            (lease,) = await scope.acquire(trained.lease)
            gradient = tensor_view(lease, KV)

            def backward() -> None:
                policy, part = kept, gradient / self._passes if self._passes > 1 else gradient
                for _ in range(self._passes):
                    policy = policy or self._encode_policy(prompt, vision, with_graph=True)
                    if self._run.context.governed:
                        backward_on_current_stream([*policy.keys, *policy.values])
                    prefix_backward(policy, part)
                    policy = None

            async with scope.exclusive(self._run.gradients):
                done = await scope.run(Task.PREFIX_BACKWARD, backward)
            span = done.span
            scope.give_back(lease)
        await scope.publish(bodies.PrefixBackpropagated(), group, span=span, cause_id=cause_id)

    # ---------------------------------------------------------------- helpers of the tasks

    def _may_keep_graph(self) -> bool:
        limit = self._run.context.recipe.training.prefix_graphs
        kept = sum(1 for work in self._groups.values() if work.policy is not None)
        return limit is None or kept < limit

    def _encode_policy(
        self, prompt: PromptTensors, vision: torch.Tensor, *, with_graph: bool
    ) -> PrefixKV:
        """Run the policy's prefix forward; in the compute thread."""
        with torch.set_grad_enabled(with_graph):
            return self._run.policy.prefix_kv(
                prompt, vision, checkpointing=with_graph and self._checkpointing
            )

    async def _export(
        self,
        group: GroupId,
        role: ModelRole,
        prefix: PrefixKV,
        consumers: list[Participant],
        span: WorkSpan,
        cause_id: str,
    ) -> None:
        """Copy K and V into a lease, so that the graph's own stay where they are."""
        scope = self._scope
        keys = prefix.keys[0]
        lease = await scope.produce(
            f"{role}.prefix_kv",
            group,
            {KV: (keys.dtype, (len(prefix.keys), 2, *keys.shape))},
            lambda out: prefix.pack(out[KV]),
            consumers=consumers,
            next_use=Task.RESPONSE_TRAIN if role is ModelRole.POLICY else Task.REFERENCE_SCORE,
            placement=Placement.DEVICE,
        )
        version = scope.view.version if role is ModelRole.POLICY else REFERENCE_VERSION
        body = bodies.PrefixEncoded(role=role, lease=lease, weights_version=version)
        await scope.publish(body, group, span=span, cause_id=cause_id)

    async def _hold_policy(self) -> None:
        if self._policy_hold is None:
            version = self._scope.view.version
            self._policy_hold = await self._scope.read(self._run.weights, version)

    async def _hold_reference(self) -> None:
        storage = self._run.reference_weights
        if self._reference_hold is None and storage is not None:
            self._reference_hold = await self._scope.read(storage, REFERENCE_VERSION)

    @property
    def _passes(self) -> int:
        return self._run.context.recipe.prefix_passes

    @property
    def _checkpointing(self) -> bool:
        return self._training and self._run.context.recipe.training.activation_checkpointing

    def _peer(self, service: Service) -> Participant:
        return self._run.context.peer(service)
