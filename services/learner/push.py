"""One version on its way to a rollout that has weights of its own, in buckets.

A bucket goes as soon as all parts of the weights in it are updated, beside the update of the next
ones.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from common.events import bodies
from common.step.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from common.ids import WeightsVersion
    from common.worker.push_link import PushLink
    from common.worker.scope import StepScope


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
        """So many of the first weights have their new values."""
        self._made = elements
        self._more.set()

    def advance(self) -> None:
        """An event was folded into the view."""
        if self._scope.view.pushed is not None:
            self._ended.set()

    async def end(self) -> Mapping[str, float]:
        """Wait until the rollout can read the version.

        Returns: of the step's metrics: bytes pushed, seconds in which they went, and seconds in
            which nothing else was done.
        """
        start_s = time.monotonic()
        await self._ended.wait()
        pushed = self._scope.view.pushed
        assert pushed is not None
        return {
            "push_bytes": float(pushed.size_bytes),
            "push_s": self._seconds,
            "push_wait_s": time.monotonic() - start_s,
        }

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
