"""What weights go to the rollout on, where it has its own: a rank of the learner and its peer.

The link is a process group of the two, Gloo's on a CPU and NCCL's between two GPUs, so that no
process of one set maps memory of the other.

Invariants:
- Each configuration joins anew. An epoch that does not end with an update closes the link on both
  sides, so neither waits for what the other will never send or take.
- Both sides cut the same elements into the same buckets, and go through them in one order.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from common.config.environment import set_collectives
from common.errors import Unavailable
from common.ids import Service
from common.worker.device import copied_aside

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

PUSHERS = (Service.LEARNER, Service.ROLLOUT)
"""The services that have such a link, by their rank in its group."""


JOIN_TIMEOUT_S = 15.0
"""Longest wait in `join` for a side that has said that it comes: it may have died since then."""


class PushBroken(Unavailable):
    """The other side has left, or this side was closed."""


class PushLink:
    """One end; valid until `close`.

    Attributes:
        bucket_bytes: size of the pieces, less for the last one.
    """

    def __init__(
        self, group: Any, *, rank: int, device: torch.device, bucket_bytes: int, timeout_s: float
    ) -> None:
        self._group = group
        self._other = 1 - rank
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self.bucket_bytes = bucket_bytes

    @classmethod
    def join(
        cls,
        rendezvous: Path,
        *,
        rank: int,
        device: torch.device,
        bucket_bytes: int,
        timeout_s: float,
    ) -> PushLink:
        """Wait for the other side, which does the same; blocks.

        Args:
            rendezvous: a file that no earlier call has used, the same for both.
            rank: place of the service in `PUSHERS`.
            device: what lies on it is sent and received.
            timeout_s: longest wait for the other side in a transfer.
        Raises: PushBroken if it does not come in time.
        """
        timeout = timedelta(seconds=JOIN_TIMEOUT_S)
        try:
            store = dist.FileStore(str(rendezvous), len(PUSHERS))
            store.set_timeout(timeout)
            group = _group(store, rank, device, timedelta(seconds=timeout_s))
            _connect(group, rank, device)
        except RuntimeError as error:
            raise PushBroken(f"{rendezvous.name}: the other side has not come: {error}") from error
        rendezvous.unlink(missing_ok=True)
        return cls(group, rank=rank, device=device, bucket_bytes=bucket_bytes, timeout_s=timeout_s)

    def buckets(self, elements: int, dtype: torch.dtype) -> list[slice]:
        """How so many elements are cut."""
        size = max(1, self.bucket_bytes // dtype.itemsize)
        return [slice(at, min(at + size, elements)) for at in range(0, elements, size)]

    async def send(self, bucket: torch.Tensor) -> None:
        """Send a bucket, which nobody may write before it has gone.

        A cancellation, here and in `receive`, closes the link.

        Args: bucket: contiguous, on the link's device.
        Raises: PushBroken.
        """
        await self._carried(lambda group: group.send([bucket], self._other, 0))

    async def receive(self, bucket: torch.Tensor) -> None:
        """Overwrite a tensor with the bucket that comes next; otherwise as `send`."""
        await self._carried(lambda group: group.recv([bucket], self._other, 0))

    async def tell(self, number: int) -> None:
        """Send a number. Raises PushBroken."""
        await self.send(torch.tensor([number], dtype=torch.int64, device=self._device))

    async def hear(self) -> int:
        """The number that comes next. Raises PushBroken."""
        number = torch.empty(1, dtype=torch.int64, device=self._device)
        await self.receive(number)
        return int(number)

    def close(self) -> None:
        """Leave the other side, whose waits end in an error. Any thread; idempotent."""
        group, self._group = self._group, None
        if group is not None and self._device.type == "cuda":
            group.abort()

    async def _carried(self, begin: Callable[[Any], dist.Work]) -> None:
        """Run a transfer in a thread; a cancellation takes effect when it has ended."""
        running = asyncio.ensure_future(asyncio.to_thread(self._carry, begin))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self.close()
            await asyncio.wait({running})
            if not running.cancelled():
                running.exception()
            raise

    def _carry(self, begin: Callable[[Any], dist.Work]) -> None:
        group = self._group
        try:
            if group is None:
                raise PushBroken("the link of learner and rollout was closed")
            copied_aside(self._device, lambda: begin(group).wait(self._timeout))
            if self._group is None:
                # NCCL ends what was under way as if all of it had gone
                raise PushBroken("the link of learner and rollout was closed meanwhile")
        except RuntimeError as error:
            raise PushBroken(f"learner or rollout has left the push: {error}") from error
        finally:
            # The connection ends with the last reference, and an error's traceback would be one.
            group = None


def _connect(group: Any, rank: int, device: torch.device) -> None:
    """Exchange a number, since NCCL connects two sides in their first transfer."""
    number, other = torch.zeros(1, dtype=torch.int64, device=device), 1 - rank
    transfers = (group.send, group.recv) if rank == 0 else (group.recv, group.send)
    for transfer in transfers:
        work = transfer([number], other, 0)
        copied_aside(device, partial(work.wait, timedelta(seconds=JOIN_TIMEOUT_S)))


def _group(store: dist.Store, rank: int, device: torch.device, timeout: timedelta) -> Any:
    set_collectives()
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        torch.cuda.set_device(device)
        return dist.ProcessGroupNCCL(store, rank, len(PUSHERS), options)
    joining = timedelta(seconds=JOIN_TIMEOUT_S)
    return dist.ProcessGroupGloo(store, rank, len(PUSHERS), joining)
