"""One epoch in the rollout: the decode loop of the engine, and the rewards of what it sampled."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from common.events import WorkSpan, bodies
from common.events.bodies import ModelRole
from common.ids import GroupId, LeaseId, Participant, Service
from common.layouts.heads import nested_heads
from common.rl.lengths import response_lengths
from common.rl.sampling import SamplingParams
from common.step.plan import StepMode
from common.step.schedule import PREFILL_FROM_LEASE
from common.step.tasks import Task
from common.tensors.spec import Placement
from common.tensors.views import tensor_view
from common.vlm.loading import text_config
from common.vlm.prefix import PrefixKV
from common.worker.prompts import EMBEDDINGS, PromptText, prompt_text, whole_prompt
from common.worker.responses import LENGTHS, LOGPROBS, TOKENS, response_tensors
from common.worker.scope import HOLD_TIMEOUT_S
from common.worker.threads import in_thread
from common.worker.weights import KV
from services.rollout.decode_loop import DecodeLoop
from services.rollout.engines.gate import NEW_TOKENS, gate_step, logprob_gate
from services.rollout.engines.protocol import FinishedGroup, GroupRequest, StepSpec
from services.rollout.recording import Recording
from services.rollout.resharded import ReshardedHold

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.tensors.lease import Lease
    from common.worker.scope import StepScope
    from common.worker.work import HeldRead, HeldWeights
    from services.rollout.run import RolloutRun

log = logging.getLogger(__name__)


class RolloutStep:
    """One epoch."""

    def __init__(self, run: RolloutRun, scope: StepScope) -> None:
        self._run = run
        self._scope = scope
        self._training = scope.plan.mode is StepMode.TRAIN
        self._lengths = run.context.recipe.rollout.lengths if self._training else None
        self._prompts: dict[GroupId, PromptText] = {}
        self._inputs: dict[GroupId, list[Lease]] = {}
        self._finished: dict[GroupId, FinishedGroup] = {}
        self._hold: HeldRead | None = None
        self._taking = False
        self._recorded = (
            None
            if scope.plan.replay_dir is None
            else Recording.read(scope.plan.replay_dir, scope.plan.step)
        )
        self._loop = DecodeLoop(run.engine, self._spec(), scope, live=run.live)
        self._loop_runs = False

    async def run(self, task: Task, group: GroupId | None, cause_id: str) -> None:
        """Add a group to the decode, or reward one."""
        assert group is not None
        if task is Task.DECODE:
            await self._add(group)
            return
        assert task is Task.REWARD
        await self._reward(group, cause_id)

    def forget(self, group: GroupId) -> None:
        """The engine must not wait for it."""
        self._prompts.pop(group, None)
        self._finished.pop(group, None)
        if self._scope.view.groups[group].generated is None:
            self._loop.drop(group)

    async def advance(self) -> None:
        """Let the update begin once nothing decodes any more; take what it pushes."""
        own, view = self._run.own, self._scope.view
        if self._hold is not None and view.window_closed:
            self._scope.give_back(self._hold)
            self._hold = None
        if own is not None and view.push is not None and not self._taking:
            self._taking = True
            self._scope.spawn(Task.UPDATE, partial(own.take, self._scope, view.push))

    def close(self) -> None:
        """End the decode, give the K/V memory back."""
        if self._run.own is not None and self._training and not self._scope.view.finished:
            self._run.own.close()
        self._run.engine.abort()
        self._run.engine.release()
        self._run.live.set_rows(0)
        self._prompts.clear()
        self._finished.clear()

    # ---------------------------------------------------------------- decode

    def _spec(self) -> StepSpec:
        plan, recipe = self._scope.plan, self._run.context.recipe
        rollout = recipe.rollout
        params = SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            stop_token_ids=() if self._lengths is not None else self._run.stop_ids,
            temperature=0.0 if plan.greedy else rollout.temperature,
            top_p=1.0 if plan.greedy else rollout.top_p,
            top_k=0 if plan.greedy else rollout.top_k,
            suppressed_token_ids=tuple(self._run.shape.suppressed.tolist()),
        )
        return StepSpec(
            step=plan.step,
            weights_version=plan.weights_version,
            seed=recipe.seed,
            groups=tuple(self._scope.view.groups),
            samples_per_group=plan.samples_per_group,
            params=params,
            forced=self._recorded is not None,
        )

    async def _add(self, group: GroupId) -> None:
        if not self._loop_runs:
            self._loop_runs = True
            self._scope.spawn(Task.DECODE, self._decode)
        self._loop.add(await self._request(group))

    async def _request(self, group: GroupId) -> GroupRequest:
        """Hold what the group's decode reads, until the engine has taken it in."""
        scope, state = self._scope, self._scope.view.groups[group]
        assert state.prepared is not None
        if self._run.own is not None:
            return await self._own_request(group, state.prepared.prompt_lease)
        assert state.vision is not None
        from_lease = scope.plan.schedule in PREFILL_FROM_LEASE
        extra = state.prefixes[ModelRole.POLICY].lease if from_lease else state.vision.lease
        wanted = [state.prepared.prompt_lease, *([extra] if extra is not None else [])]
        leases = await scope.acquire(*wanted)
        text = prompt_text(leases[0])
        self._prompts[group] = text
        self._inputs[group] = leases
        return GroupRequest(
            group=group,
            prompt=text.without_pixels(),
            prefix=self._prefix(leases[1]) if from_lease else None,
            vision=(
                tensor_view(leases[1], EMBEDDINGS) if extra is not None and not from_lease else None
            ),
            recorded=None if self._recorded is None else self._recorded.responses(group),
            limits=self._limits(group),
        )

    def _prefix(self, lease: Lease) -> PrefixKV:
        """This rank's key/value heads of those in the lease, as views of it."""
        context = self._run.context
        heads = nested_heads(
            text_config(self._run.shape.config).num_key_value_heads,
            reader=context.partners.cut(context.participant),
            holder=context.partners.cut(context.peer(Service.PREFIX_ENCODER)),
        )
        assert heads is not None, "a run that prefills from leases is refused where none nest"
        return PrefixKV.unpack(tensor_view(lease, KV)[:, :, slice(*heads)])

    async def _own_request(self, group: GroupId, prompt_lease: LeaseId) -> GroupRequest:
        """The same, of a rollout that encodes pictures itself."""
        scope, run = self._scope, self._run
        (lease,) = await scope.acquire(prompt_lease)
        self._prompts[group] = text = prompt_text(lease)
        self._inputs[group] = [lease]

        def encode() -> torch.Tensor:
            with torch.no_grad():
                return run.model.vision_embeddings(whole_prompt(lease).to(run.context.device))

        return GroupRequest(
            group=group,
            prompt=text.without_pixels(),
            encode=encode,
            recorded=None if self._recorded is None else self._recorded.responses(group),
            limits=self._limits(group),
        )

    def _limits(self, group: GroupId) -> tuple[int, ...] | None:
        if self._lengths is None:
            return None
        plan = self._scope.plan
        return response_lengths(
            self._lengths,
            seed=self._run.context.recipe.seed,
            step=plan.step,
            group=group,
            samples=plan.samples_per_group,
        )

    async def _decode(self) -> None:
        """Decode all groups of the step; publishes the window and each finished group in order."""
        scope, memory = self._scope, self._run.memory
        await self._hold_weights()
        scope.keep(memory)
        await memory.take(timeout_s=HOLD_TIMEOUT_S)
        await self._gate()
        admitting_ns = opened_ns = None
        sampled: list[FinishedGroup] = []
        async for turn in self._loop.turns():
            if turn.admitted and admitting_ns is None:
                admitting_ns = turn.start_ns
            for group in turn.admitted:
                scope.give_back(*self._inputs.pop(group))
            if turn.decoding and opened_ns is None:
                opened_ns = time.monotonic_ns()
                start_ns = admitting_ns or opened_ns
                span = WorkSpan(task=Task.DECODE, start_ns=start_ns, end_ns=opened_ns)
                await scope.publish(bodies.WindowOpened(), span=span)
            for finished in turn.finished:
                sampled.append(finished)
                await self._publish(finished, opened_ns or turn.start_ns, turn.end_ns)
        scope.give_back(memory)
        if (refreshed := self._run.engine.refreshed) is not None:
            await scope.publish(refreshed.event(scope.view.version))
        end_ns = time.monotonic_ns()
        records = self._training and self._run.context.leads
        if records and self._run.context.recipe.training.record_responses:
            folder = self._run.context.run_dir / "responses"
            replica = self._run.context.place.replica
            await in_thread(
                lambda: Recording.write(folder, scope.plan.step, sampled, replica=replica)
            )
        closed = bodies.WindowClosed(
            decode_iterations=max((f.decode_iteration for f in sampled), default=0),
            response_tokens=sum(int(f.tokens.numel()) for f in sampled),
        )
        span = WorkSpan(task=Task.DECODE, start_ns=opened_ns or end_ns, end_ns=end_ns)
        await scope.publish(closed, span=span)

    async def _hold_weights(self) -> None:
        """Hold the version that the step is about. Raises WrongVersion."""
        run, scope = self._run, self._scope
        if run.own is not None:
            run.own.require(scope.view.version)
        weights: HeldWeights[HeldRead] = run.weights
        self._hold = hold = await scope.read(weights, scope.view.version)
        if isinstance(hold, ReshardedHold):
            await scope.publish(hold.refreshed.event(scope.view.version))

    async def _gate(self) -> None:
        """Hold the engine against the trainer's pass, once a run. Raises LogprobGateFailed."""
        run, bound = self._run, self._run.context.recipe.rollout.logprob_bound
        if run.gate_passed or bound is None:
            return
        params = replace(self._spec().params, stop_token_ids=(), max_new_tokens=NEW_TOKENS)
        spec = gate_step(self._spec(), params)
        found = await self._scope.run(
            Task.DECODE, lambda: logprob_gate(run.engine, run.model, spec, bound=bound)
        )
        log.info("engine agrees with the trainer", extra={"differences": found.value})
        run.gate_passed = True

    async def _publish(self, finished: FinishedGroup, start_ns: int, end_ns: int) -> None:
        scope, group = self._scope, finished.group
        self._finished[group] = finished
        lease: LeaseId | None = None
        consumers = self._readers(group)
        if consumers:

            def fill(out: Mapping[str, torch.Tensor]) -> None:
                out[TOKENS].copy_(finished.tokens)
                out[LENGTHS].copy_(finished.lengths)
                out[LOGPROBS].copy_(finished.logprobs)

            lease = await scope.produce(
                "responses",
                group,
                response_tensors(finished.tokens.numel(), finished.lengths.numel()),
                fill,
                consumers=consumers,
                next_use=Task.REFERENCE_SCORE,
                placement=Placement.HOST,
            )
        body = bodies.GroupGenerated(
            lease=lease,
            response_tokens=finished.tokens.numel(),
            decode_iteration=finished.decode_iteration,
            weights_version=finished.weights_version,
        )
        span = WorkSpan(task=Task.DECODE, start_ns=start_ns, end_ns=end_ns)
        await scope.publish(body, group, span=span)

    def _readers(self, group: GroupId) -> list[Participant]:
        if not self._training:
            return []
        context, planned = self._run.context, self._scope.view.groups[group].planned
        readers = [*context.readers(Service.LEARNER, planned)]
        if context.recipe.needs_reference:
            readers += context.readers(Service.REFERENCE, planned)
        return readers

    # ---------------------------------------------------------------- rewards

    async def _reward(self, group: GroupId, cause_id: str) -> None:
        scope, state = self._scope, self._scope.view.groups[group]
        finished, prompt = self._finished.pop(group), self._prompts.pop(group)
        responses = finished.tokens.split(finished.lengths.tolist())
        completions = [
            str(self._run.tokenizer.decode(tokens, skip_special_tokens=True))
            for tokens in responses
        ]
        start_ns = time.monotonic_ns()
        outcome = await self._run.rewards.score(
            group,
            completions,
            [prompt.row] * len(completions),
            evaluation=scope.plan.mode is StepMode.EVAL,
        )
        span = WorkSpan(task=Task.REWARD, start_ns=start_ns, end_ns=time.monotonic_ns())
        body: bodies.Body
        if outcome.dropped:
            reasons = "; ".join(
                f"{f.function} on response {f.sample}: {f.cause}" for f in outcome.failures
            )
            body = bodies.GroupDropped(code="reward", reason=reasons, sample=state.planned.sample)
        else:
            body = bodies.GroupRewarded(rewards=outcome.rewards, failures=len(outcome.failures))
        await scope.publish(body, group, span=span, cause_id=cause_id)
