"""The prefix backward of a group, and its forward again where no graph has stayed.

Where the device has no memory for that forward, the graphs of other groups go first, then what any
process has cached; then it is tried once more. Nothing was added to the accumulator before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import torch

from common.errors import ResourceExhausted
from common.events import bodies
from common.gpu.backward import backward_on_current_stream
from common.gpu.driver import device_uuid
from common.step.tasks import Task
from common.tensors.device import HOST
from common.tensors.views import tensor_view
from common.vlm.prefix import prefix_backward
from common.worker.weights import KV

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.events import WorkSpan
    from common.ids import GroupId
    from common.vlm.prefix import PrefixKV
    from common.worker.scope import StepScope
    from services.prefix_encoder.forwards import Forwards
    from services.prefix_encoder.run import PrefixEncoderRun
    from services.prefix_encoder.step import GroupWork

log = logging.getLogger(__name__)

GIVEN_BACK_WITHIN_S = 2.0
"""How long other processes have to return what they cache, each between two of its jobs."""


class NoMemoryForPrefix(ResourceExhausted):
    """A prefix does not fit on the device, although others have given memory back."""

    retryable = True


class PrefixBackward:
    """Of one epoch."""

    def __init__(
        self,
        run: PrefixEncoderRun,
        scope: StepScope,
        forwards: Forwards,
        groups: dict[GroupId, GroupWork],
    ) -> None:
        """Args: groups: the epoch's; one leaves it here, and others may lose their graphs."""
        self._run = run
        self._scope = scope
        self._forwards = forwards
        self._groups = groups

    async def run(self, group: GroupId, cause_id: str) -> None:
        """Add the group's prefix part to the accumulator."""
        scope = self._scope
        trained = scope.view.groups[group].trained
        work = self._groups.pop(group)
        assert trained is not None
        body, span = bodies.PrefixBackpropagated(), None
        if trained.lease is not None:
            (lease,) = await scope.acquire(trained.lease)
            body, span = await self._backward(work, tensor_view(lease, KV))
            scope.give_back(lease)
        await scope.publish(body, group, span=span, cause_id=cause_id)

    async def _backward(
        self, work: GroupWork, gradient: torch.Tensor
    ) -> tuple[bodies.PrefixBackpropagated, WorkSpan]:
        """Args: gradient: [L, 2, K, P, D] of the prefix K/V."""
        run, scope, tokens = self._run, self._scope, work.prompt.prefix_tokens
        vision, prompt = work.vision, work.prompt
        assert vision is not None
        passes = run.context.recipe.prefix_passes
        kept, work.policy = work.policy, None
        recomputed = kept is None
        job = BackwardJob(
            kept,
            gradient / passes if passes > 1 else gradient,
            passes=passes,
            forward=lambda: self._forwards.policy_prefix(prompt, vision, with_graph=True),
            switch_streams=run.context.governed,
        )
        del kept
        async with scope.exclusive(run.gradients):
            done = await scope.run(Task.PREFIX_BACKWARD, job.run, work=tokens)
            # Other ranks are in the middle of it, and have not dropped what this one would.
            if not done.value and run.context.degree == 1:
                await self._make_room(tokens)
                done = await scope.run(Task.PREFIX_BACKWARD, job.run, work=tokens)
            if not done.value:
                raise NoMemoryForPrefix(
                    f"no memory to run a prefix of {tokens} tokens forward again: {job.cause}; "
                    "lower rollout.max_slots or data.max_prompt_tokens, or set "
                    "training.activation_checkpointing = true"
                )
        body = bodies.PrefixBackpropagated(recomputed=recomputed, recompute_s=job.recompute_s())
        return body, done.span

    async def _make_room(self, tokens: int) -> None:
        """Drop what can be made again, have everybody return what they cache, and wait for it."""
        graphs = [work for work in self._groups.values() if work.policy is not None]
        for work in graphs:
            work.policy = None
        device = self._run.context.device
        log.warning(
            "no memory to run a prefix forward again: one more try when others gave some back",
            extra={"tokens": tokens, "graphs_dropped": len(graphs)},
        )
        wanted = bodies.MemoryWanted(
            device=device_uuid(device.index) if device.type == "cuda" else HOST,
            size_bytes=self._run.graphs.bytes_of(tokens),
        )
        # This process gives back too: the event comes to it as to all others.
        await self._scope.publish(wanted)
        await asyncio.sleep(GIVEN_BACK_WITHIN_S)


class BackwardJob:
    """All passes of one group, in the compute thread; may be run again after a refusal."""

    def __init__(
        self,
        kept: PrefixKV | None,
        gradient: torch.Tensor,
        *,
        passes: int,
        forward: Callable[[], PrefixKV],
        switch_streams: bool,
    ) -> None:
        """Args:
        kept: with its graph; None: it runs forward again.
        gradient: [L, 2, K, P, D], of one pass.
        switch_streams: whether the forward may have run on a share of the SMs.
        """
        self.cause = ""
        """Why the last run ended early."""
        self._policy = kept
        self._gradient = gradient
        self._passes = passes
        self._forward = forward
        self._switch_streams = switch_streams
        self._marks: list[tuple[Mark, Mark]] = []

    def run(self) -> bool:
        """Returns: whether all passes are in the accumulator; no: there was no memory."""
        while self._passes:
            policy, self._policy = self._policy, None
            if policy is None:
                policy = self._again()
            if policy is None:
                return False
            if self._switch_streams:
                backward_on_current_stream([*policy.keys, *policy.values])
            prefix_backward(policy, self._gradient)
            self._passes -= 1
        return True

    def recompute_s(self) -> float:
        """Time of the forwards that ran again; for when the job has ended."""
        return sum(_seconds(start, end) for start, end in self._marks)

    def _again(self) -> PrefixKV | None:
        device = self._gradient.device
        start = _mark(device)
        try:
            policy = self._forward()
        except torch.OutOfMemoryError as error:
            self.cause = str(error)
            return None
        self._marks.append((start, _mark(device)))
        return policy


Mark = torch.cuda.Event | float


def _mark(device: torch.device) -> Mark:
    """A moment of the stream's work, without waiting for it."""
    if device.type != "cuda":
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
    return float(start.elapsed_time(end)) / 1e3
