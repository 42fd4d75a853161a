"""Carries out what the service asks of the engine, in the engine's event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.managers.io_struct import (
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer

from services.rollout.engines.sglang.host.sampling import Sampler
from services.rollout.engines.sglang.host.update import UpdateRefused, require, updating
from services.rollout.engines.sglang.host.weights import REFRESH_LOADER
from services.rollout.engines.sglang.messages import (
    ABORT,
    DECODE,
    DONE,
    DROP,
    FAILED,
    LOAD,
    REFRESH,
    RELEASE,
    RESUME,
    STOP,
    GroupSampling,
)
from services.rollout.engines.sglang.wire import ChannelClosed, Frame, receive, send

if TYPE_CHECKING:
    import socket

_FLUSH_S = 30.0
"""Longest wait for the end of what still uses the caches."""


class Serving:
    """One engine and its service."""

    def __init__(
        self, engine: Any, channel: socket.socket, *, ranks: int, prompts_stay: bool
    ) -> None:
        """Args:
        ranks: of the engine, each of which is given weights.
        prompts_stay: see `Sampler`.
        """
        self._engine = engine
        self._ranks = ranks
        self._manager = engine.tokenizer_manager
        self._channel = channel
        self._sampler = Sampler(engine, self._report, prompts_stay=prompts_stay)
        self._frames: asyncio.Queue[Frame] = asyncio.Queue()

    async def run(self) -> None:
        """Serve until `STOP`."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, args=(loop,), name="channel", daemon=True).start()
        while (frame := await self._frames.get()).kind != STOP:
            if frame.kind == DECODE:
                self._sampler.start(GroupSampling.of(frame))
            elif frame.kind == DROP:
                self._sampler.drop(frame.body["group"])
            else:
                await self._answer(frame)
        await self._sampler.abort()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                frame = receive(self._channel)
                loop.call_soon_threadsafe(self._frames.put_nowait, frame)
                if frame.kind == STOP:
                    return
        except ChannelClosed:
            # The service has gone, or has given up on this engine.
            os.killpg(0, signal.SIGKILL)

    def _report(self, frame: Frame) -> None:
        send(self._channel, frame)

    async def _answer(self, frame: Frame) -> None:
        try:
            # all of it comes between steps: what is left is of groups that were dropped
            await self._sampler.abort()
            if frame.kind == LOAD:
                await self._load(frame)
            elif frame.kind == REFRESH:
                await self._refresh(frame.body["version"])
            elif frame.kind == RESUME:
                resume = ResumeMemoryOccupationReqInput(tags=[GPU_MEMORY_TYPE_KV_CACHE])
                await self._manager.resume_memory_occupation(resume, None)
            elif frame.kind == RELEASE:
                await self._release()
            else:
                assert frame.kind == ABORT
        except Exception as error:  # noqa: BLE001 - the service raises it
            body = {"message": f"{type(error).__name__}: {error}"}
            self._report(Frame(kind=FAILED, body=body))
        else:
            self._report(Frame(kind=DONE))

    async def _load(self, frame: Frame) -> None:
        await self._update(list(frame.tensors.items()), load_format=None, version=None)

    async def _refresh(self, version: str) -> None:
        # SGLang wants a tensor
        tensors = [("version", torch.zeros(1))]
        await self._update(tensors, load_format=REFRESH_LOADER, version=version)
        await self._flush()

    async def _release(self) -> None:
        # the scheduler ends itself if it is asked for memory while it still has requests
        await self._flush()
        release = ReleaseMemoryOccupationReqInput(tags=[GPU_MEMORY_TYPE_KV_CACHE])
        await self._manager.release_memory_occupation(release, None)

    async def _flush(self) -> None:
        """Wait until nothing uses the caches, and empty them. Raises UpdateRefused."""
        flushed = await self._manager.flush_cache(timeout_s=_FLUSH_S)
        if not flushed.success:
            raise UpdateRefused(f"prefix cache not emptied: {flushed}")

    async def _update(
        self,
        tensors: list[tuple[str, torch.Tensor]],
        *,
        load_format: str | None,
        version: str | None,
    ) -> None:
        """Raises: UpdateRefused if any of the calls answers with a failure."""
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[
                MultiprocessingSerializer.serialize(tensors) for _ in range(self._ranks)
            ],
            load_format=load_format,
            flush_cache=version is not None,
            weight_version=version,
        )
        async with updating(self._manager):
            require(await self._manager.update_weights_from_tensor(request, None))
