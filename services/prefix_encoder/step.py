"""One epoch in the prefix-encoder: prompts, vision, prefixes of both roles, prefix backward.

A group's policy graph lives from its prefix forward to its prefix backward in this process; what
leaves it are copies of K and V, and what comes back are their gradients.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.data.errors import SampleError
from common.events import WorkSpan, bodies
from common.events.bodies import ModelRole
from common.ids import GroupId, LeaseId, Participant, Service
from common.step.plan import StepMode
from common.step.schedule import OWN_WEIGHTS, PREFILL_FROM_LEASE
from common.step.tasks import AHEAD, Task
from common.tensors.spec import Placement
from common.worker.prompts import EMBEDDINGS, prompt_tensors, whole_prompt
from common.worker.threads import in_thread
from common.worker.weights import KV, REFERENCE_VERSION
from services.prefix_encoder.ahead_step import AheadStep
from services.prefix_encoder.backward import PrefixBackward
from services.prefix_encoder.forwards import Forwards
from services.prefix_encoder.holds import WeightHolds

if TYPE_CHECKING:
    import torch

    from common.vlm.prefix import PrefixKV
    from common.vlm.prompt import PromptTensors
    from common.worker.scope import StepScope
    from services.prefix_encoder.graphs import Encoded
    from services.prefix_encoder.run import PrefixEncoderRun


@dataclass(slots=True)
class GroupWork:
    """What this process keeps of one group."""

    prompt: PromptTensors
    vision: torch.Tensor | None = None
    """[V, h]; with its graph where the tower trains."""
    policy: PrefixKV | None = None
    """With its graph, until its backward; None: not encoded yet, or to be encoded again."""
    reference: PrefixKV | None = None
    """Done in the step before, and not exported yet."""


class PrefixEncoderStep:
    """One epoch."""

    def __init__(self, run: PrefixEncoderRun, scope: StepScope) -> None:
        self._run = run
        self._scope = scope
        self._groups: dict[GroupId, GroupWork] = {}
        self._holds = WeightHolds(scope, run.weights, run.reference_weights)
        self._forwards = Forwards(run, training=scope.plan.mode is StepMode.TRAIN)
        self._ahead = AheadStep(run, scope, self._holds, self._forwards)
        self._backward = PrefixBackward(run, scope, self._forwards, self._groups)

    async def run(self, task: Task, group: GroupId | None, cause_id: str) -> None:
        """Do one task of one group."""
        assert group is not None
        match task:
            case _ if task in AHEAD:
                await self._ahead.run(task, group, cause_id)
            case Task.PREPARE:
                await self._prepare(group, cause_id)
            case Task.POLICY_VISION:
                await self._policy_vision(group, cause_id)
            case Task.POLICY_PREFIX:
                await self._policy_prefix(group, cause_id)
            case Task.REFERENCE_PREFIX:
                await self._reference_prefix(group, cause_id)
            case Task.PREFIX_BACKWARD:
                await self._backward.run(group, cause_id)
            case _:
                raise AssertionError(f"{task} is not the prefix-encoder's")

    def forget(self, group: GroupId) -> None:
        """Drop the group's tensors and graph."""
        self._groups.pop(group, None)

    async def advance(self) -> None:
        """Let the update begin once every living group is accumulated, and the reference go."""
        self._holds.advance()

    def close(self) -> None:
        """Drop every graph."""
        self._groups.clear()

    @property
    def kept_graphs(self) -> int:
        """Policy prefixes that have run and wait for their backward with their graph."""
        return sum(1 for work in self._groups.values() if work.policy is not None)

    # ---------------------------------------------------------------- tasks

    async def _prepare(self, group: GroupId, cause_id: str) -> None:
        scope, run = self._scope, self._run
        planned = scope.view.groups[group].planned
        start_ns = time.monotonic_ns()
        loaded = run.ahead.take((planned.split, planned.sample))
        try:
            if loaded is None:
                loaded = await run.load(await run.pool.prepare(planned.split, planned.sample))
        except SampleError as error:
            dropped = bodies.GroupDropped(
                code=error.fault.value, reason=str(error), sample=planned.sample
            )
            await scope.publish(dropped, group, cause_id=cause_id)
            return
        prompt, context = loaded.text, run.context
        followers = context.ranks[1:]
        pixels = bool(followers) or scope.plan.schedule in OWN_WEIGHTS
        shapes, fill = prompt_tensors(
            loaded.prompt if pixels else prompt, loaded.row_json, pixels=pixels
        )
        lease = await scope.produce(
            "prompt",
            group,
            shapes,
            fill,
            consumers=[
                *context.partners.all(Service.ROLLOUT, replica=planned.rollout_replica),
                *followers,
            ],
            next_use=Task.DECODE,
            placement=Placement.HOST,
        )
        self._groups[group] = GroupWork(
            loaded.prompt, vision=loaded.vision, reference=loaded.reference
        )
        prepared = bodies.GroupPrepared(
            prompt_lease=lease,
            prompt_tokens=prompt.prefix_tokens + 1,
            vision_tokens=prompt.vision_tokens,
            last_token=prompt.last_token,
            start_position=prompt.start_position,
        )
        span = WorkSpan(task=Task.PREPARE, start_ns=start_ns, end_ns=time.monotonic_ns())
        await scope.publish(prepared, group, span=span, cause_id=cause_id)

    async def _received(self, group: GroupId) -> GroupWork:
        """What rank 0 has prepared."""
        scope, prepared = self._scope, self._scope.view.groups[group].prepared
        assert prepared is not None
        (lease,) = await scope.acquire(prepared.prompt_lease)
        prompt = await self._run.on_device(await in_thread(lambda: whole_prompt(lease)))
        scope.give_back(lease)
        return GroupWork(prompt)

    async def _policy_vision(self, group: GroupId, cause_id: str) -> None:
        scope = self._scope
        if not self._run.context.leads:
            self._groups[group] = await self._received(group)
        work = self._groups[group]
        span: WorkSpan | None = None
        vision = work.vision
        if vision is None:
            await self._holds.hold_policy()
            encoded = await scope.run(
                Task.POLICY_VISION,
                lambda: self._forwards.policy_vision(work.prompt),
                work=work.prompt.vision_tokens,
            )
            vision, span = encoded.value, encoded.span
            work.vision = vision
            if self._run.one_tower:
                work.prompt = work.prompt.without_pixels()
        detached = vision.detach()
        lease: LeaseId | None = None
        taken = scope.plan.schedule not in PREFILL_FROM_LEASE | OWN_WEIGHTS
        readers = self._rollout_readers(group)
        if taken and detached.shape[0] and readers:
            lease = await scope.produce(
                "policy.vision",
                group,
                {EMBEDDINGS: (detached.dtype, tuple(detached.shape))},
                lambda out: out[EMBEDDINGS].copy_(detached),
                consumers=readers,
                next_use=Task.DECODE,
                placement=Placement.DEVICE,
            )
        body = bodies.PolicyVisionEncoded(lease=lease, weights_version=scope.view.version)
        await scope.publish(body, group, span=span, cause_id=cause_id)

    async def _policy_prefix(self, group: GroupId, cause_id: str) -> None:
        scope, work = self._scope, self._groups[group]
        if self._run.context.leads:
            self._run.admission.require_room(scope.view)
        await self._holds.hold_policy()
        vision = work.vision
        assert vision is not None

        prompt, kept = work.prompt, self.kept_graphs

        def forward() -> Encoded[PrefixKV]:
            return self._run.graphs.forward(
                lambda keep: self._forwards.policy_prefix(prompt, vision, with_graph=keep),
                prompt.prefix_tokens,
                kept=kept,
            )

        done = await scope.run(Task.POLICY_PREFIX, forward, work=prompt.prefix_tokens)
        encoded = done.value
        work.policy = None if encoded.graph_bytes is None else encoded.value
        consumers = [self._peer(Service.LEARNER)]
        if scope.plan.schedule in PREFILL_FROM_LEASE:
            consumers += self._rollout_readers(group)
        await self._export(
            group,
            ModelRole.POLICY,
            encoded.value,
            consumers,
            done.span,
            cause_id,
            graph_bytes=encoded.graph_bytes,
        )

    async def _reference_prefix(self, group: GroupId, cause_id: str) -> None:
        scope, work = self._scope, self._groups[group]
        if self._run.context.leads:
            self._run.admission.require_room(scope.view)
        span: WorkSpan | None = None
        prefix, work.reference = work.reference, None
        if prefix is None:
            await self._holds.hold_policy()
            async with self._holds.reference.reading():
                encoded = await scope.run(
                    Task.REFERENCE_PREFIX,
                    lambda: self._forwards.reference_prefix(work.prompt, work.vision),
                    work=work.prompt.prefix_tokens,
                )
            prefix, span = encoded.value, encoded.span
        consumers = [self._peer(Service.REFERENCE)]
        await self._export(group, ModelRole.REFERENCE, prefix, consumers, span, cause_id)

    # ---------------------------------------------------------------- helpers of the tasks

    async def _export(
        self,
        group: GroupId,
        role: ModelRole,
        prefix: PrefixKV,
        consumers: list[Participant],
        span: WorkSpan | None,
        cause_id: str,
        *,
        graph_bytes: int | None = None,
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
        body = bodies.PrefixEncoded(
            role=role, lease=lease, weights_version=version, graph_bytes=graph_bytes
        )
        await scope.publish(body, group, span=span, cause_id=cause_id)

    def _rollout_readers(self, group: GroupId) -> tuple[Participant, ...]:
        """The ranks of the rollout that decode from what this rank makes of a group."""
        planned = self._scope.view.groups[group].planned
        return self._run.context.readers(Service.ROLLOUT, planned)

    def _peer(self, service: Service) -> Participant:
        return self._run.context.peer(service)
