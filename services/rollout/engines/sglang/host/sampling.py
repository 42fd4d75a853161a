"""Requests to the engine: the responses of a group on one prefix in its cache."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import torch

from services.rollout.engines.sglang.drawing import Draws
from services.rollout.engines.sglang.host.sampler import DrawsCarrier
from services.rollout.engines.sglang.messages import (
    BROKE,
    PROGRESS,
    GroupSampling,
    SampledResponse,
)
from services.rollout.engines.sglang.processors.prepared import PreparedPrompt
from services.rollout.engines.sglang.wire import Frame

if TYPE_CHECKING:
    from collections.abc import Callable

_ABORT_AGAIN_S = 0.2
"""A request that was on its way to the scheduler has not heard of an abort."""
_ABORTED = "abort"
_CARRIER = DrawsCarrier.to_str()


class Sampler:
    """The groups that decode.

    Args:
        engine: SGLang's, in whose event loop everything runs.
        report: takes frames for the service.
        prompts_stay: whether a prompt stays in the cache for as long as its group decodes.
    """

    def __init__(self, engine: Any, report: Callable[[Frame], None], *, prompts_stay: bool) -> None:
        self._engine = engine
        self._report = report
        self._prompts_stay = prompts_stay
        self._prompts: list[PreparedPrompt] = []
        self._groups: dict[int, asyncio.Task[None]] = {}
        self._requests: dict[str, int] = {}
        self._unwanted: set[int] = set()
        self._number = 0
        self._active = 0
        self._tokens = 0
        """Since the last report."""
        self._reporting = False
        self._steps = self._told_steps = 0
        self._reached: dict[tuple[int, int], int] = {}
        """Decode step of the newest token, by group and response."""

    def start(self, group: GroupSampling) -> None:
        """Begin to sample a group."""
        task = asyncio.get_running_loop().create_task(self._guarded(group))
        self._groups[group.group] = task
        task.add_done_callback(lambda _: self._groups.pop(group.group, None))

    def drop(self, group: int) -> None:
        """End a group's requests, and report nothing of it any more."""
        if group in self._groups:
            self._unwanted.add(group)
            for request, owner in self._requests.items():
                if owner == group:
                    self._engine.tokenizer_manager.abort_request(request)

    async def abort(self) -> None:
        """End all requests; nothing of them is reported afterwards."""
        self._unwanted.update(self._groups)
        while tasks := list(self._groups.values()):
            self._engine.tokenizer_manager.abort_request(abort_all=True)
            await asyncio.wait(tasks, timeout=_ABORT_AGAIN_S)
        self._unwanted.clear()
        self._tokens = 0
        while self._prompts:
            self._prompts.pop().close()

    async def _guarded(self, group: GroupSampling) -> None:
        try:
            await self._sample(group)
        except Exception as error:  # noqa: BLE001 - whatever SGLang raises is the group's failure
            if group.group not in self._unwanted:
                cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
                body = {"group": group.group, "message": f"{type(cause).__name__}: {cause}"}
                self._report(Frame(kind=BROKE, body=body))

    async def _sample(self, group: GroupSampling) -> None:
        inputs: dict[str, Any] = {"input_ids": group.token_ids.tolist()}
        prompt: PreparedPrompt | None = None
        if len(group.vision):
            prompt = PreparedPrompt(group)
            self._prompts.append(prompt)
            inputs["image_data"] = [prompt]
        if len(group.limits) > 1:
            # the prompt's keys and values are in the cache when this is back
            sampling = {
                "max_new_tokens": 0,
                "temperature": 0.0,
                "custom_params": _draws(group, 0).to_json(),
            }
            async for _ in self._stream(group.group, inputs, sampling):
                pass
            if prompt is not None and self._prompts_stay and not group.mm_token_type_ids[-1]:
                inputs["image_data"] = [prompt.without_embeddings()]
        async with asyncio.TaskGroup() as tasks:
            for sample in range(len(group.limits)):
                if group.group not in self._unwanted:
                    tasks.create_task(self._respond(group, sample, inputs))

    async def _respond(self, group: GroupSampling, sample: int, inputs: dict[str, Any]) -> None:
        sampling = {
            **group.sampling,
            "max_new_tokens": group.limits[sample],
            "custom_params": _draws(group, sample).to_json(),
        }
        tokens: list[int] = []
        logprobs: list[float] = []
        meta: dict[str, Any] = {}
        stream = self._stream(group.group, inputs, sampling, return_logprob=True)
        try:
            async for chunk in stream:
                meta = chunk["meta_info"]
                if chunk["output_ids"] and not tokens:
                    self._active += 1
                tokens += chunk["output_ids"]
                logprobs += [logprob for logprob, _, _ in meta["output_token_logprobs"]]
                self._count((group.group, sample), len(chunk["output_ids"]))
        finally:
            self._active -= bool(tokens)
            self._reached.pop((group.group, sample), None)
        if (meta["finish_reason"] or {}).get("type") == _ABORTED or group.group in self._unwanted:
            if group.group in self._unwanted:
                return
            raise RuntimeError(f"SGLang ended response {sample}: {meta['finish_reason']}")
        # SGLang 0.5.17 tells no more than the version at the end
        spans = meta.get("weight_versions", [{"version": meta["weight_version"]}])
        response = SampledResponse(
            group=group.group,
            sample=sample,
            tokens=torch.tensor(tokens, dtype=torch.int64),
            logprobs=torch.tensor(logprobs, dtype=torch.float32),
            versions=tuple(sorted({span["version"] for span in spans})),
            cached_tokens=meta["cached_tokens"],
        )
        self._flush()
        self._report(response.frame())

    async def _stream(
        self, group: int, inputs: dict[str, Any], sampling: dict[str, Any], **further: Any
    ) -> Any:
        self._number += 1
        request = f"{group}-{self._number}"
        self._requests[request] = group
        try:
            stream = await self._engine.async_generate(
                **inputs,
                sampling_params=sampling,
                rid=request,
                stream=True,
                custom_logit_processor=_CARRIER,
                **further,
            )
            async for chunk in stream:
                yield chunk
        finally:
            self._requests.pop(request, None)

    def _count(self, response: tuple[int, int], tokens: int) -> None:
        """Fold in a chunk. Those of one decode step may come in several turns of the loop.

        A decode step gives each response one token; the first one is its prefill's, and counts
        where nothing else decodes.
        """
        if not tokens:
            return
        if not self._reporting:
            self._reporting = True
            asyncio.get_running_loop().call_soon(self._report_steps)
        self._tokens += tokens
        before = self._reached.get(response, self._steps - bool(self._reached))
        self._reached[response] = before + tokens
        self._steps = max(self._steps, before + tokens)

    def _report_steps(self) -> None:
        self._reporting = False
        if self._steps > self._told_steps:
            self._flush()

    def _flush(self) -> None:
        """Report the tokens until here, and the steps that nobody has been told of."""
        if self._tokens:
            steps = self._steps - self._told_steps
            body = {"tokens": self._tokens, "steps": steps, "active": self._active}
            self._report(Frame(kind=PROGRESS, body=body))
            self._told_steps, self._tokens = self._steps, 0


def _draws(group: GroupSampling, sample: int) -> Draws:
    sampling = group.sampling
    return Draws(
        seed=group.seed,
        step=group.step,
        temperature=sampling["temperature"],
        top_p=sampling["top_p"],
        top_k=max(0, sampling["top_k"]),
        group=group.group,
        sample=sample,
        prompt_tokens=len(group.token_ids),
    )
