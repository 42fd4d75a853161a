"""One version on its way to a rollout that has weights of its own, in buckets.

A bucket goes as soon as all of the weights in it are made, beside the update of the next ones.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, NamedTuple

from common.events import bodies
from common.step.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from common.ids import WeightsVersion
    from common.worker.push_link import PushLink
    from common.worker.scope import StepScope


class Pushed(NamedTuple):
    """What one rank has pushed."""

    size_bytes: float
    seconds: float
    """In which buckets went."""
    wait_s: float
    """In which nothing else was done."""


def push_metrics(pushes: Iterable[Pushed]) -> dict[str, float]:
    """Of a step: bytes of all ranks, and the times of the slowest."""
    sizes, seconds, waits = zip(*pushes, strict=True)
    return {"push_bytes": sum(sizes), "push_s": max(seconds), "push_wait_s": max(waits)}


class WeightsPush:
    """See the module's text."""

    def __init__(
        self,
        scope: StepScope,
        link: PushLink,
        *,
        version: WeightsVersion,
        weights: torch.Tensor,
    ) -> None:
        """Args: weights: [E'] that the update changes; what is not made yet may be written."""
        self._scope = scope
        self._link = link
        self._version = version
        self._weights = weights
        self._made = 0
        self._more = asyncio.Event()
        self._ended = asyncio.Event()
        self._seconds = 0.0

    async def begin(self) -> None:
        """Tell the rollout, and send what is made from now on."""
        elements = self._weights.numel()
        body = bodies.PushBegan(weights_version=self._version, elements=elements)
        await self._scope.publish(body)
        self._scope.spawn(Task.UPDATE, self._send)

    def made(self, elements: int) -> None:
        """So many of the first weights have their new values, and may be sent."""
        self._made = elements
        self._more.set()

    def advance(self) -> None:
        """An event was folded into the view."""
        if self._scope.view.pushed is not None:
            self._ended.set()

    async def end(self) -> Pushed:
        """Wait until the rollout can read the version."""
        start_s = time.monotonic()
        await self._ended.wait()
        pushed = self._scope.view.pushed
        assert pushed is not None
        return Pushed(pushed.size_bytes, self._seconds, time.monotonic() - start_s)

    async def _send(self) -> None:
        for bucket in self._link.buckets(self._weights.numel(), self._weights.dtype):
            while self._made < bucket.stop:
                self._more.clear()
                await self._more.wait()
            start_s = time.monotonic()
            await self._link.send(self._weights[bucket])
            self._seconds += time.monotonic() - start_s


async def push_whole(link: PushLink, version: WeightsVersion, weights: torch.Tensor) -> None:
    """Bring the rollout to a version that it does not have, as after a restart of it or of this.

    Args: weights: [E], held. Raises: PushBroken.
    """
    held = await link.hear()
    await link.tell(version)
    if held != version:
        for bucket in link.buckets(weights.numel(), weights.dtype):
            await link.send(weights[bucket])
