"""Which device a worker computes on, in this process's numbering and in everybody's."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from common.gpu.context import open_context
from common.gpu.driver import CudaMissing, device_uuid
from common.gpu.health import watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.config.deployment import Deployment
    from common.ids import Participant

T = TypeVar("T")


def wait_for(device: torch.device) -> None:
    """Block until the calling thread's stream on a device has done everything it was asked for."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def copied_aside(device: torch.device, copy: Callable[[], T]) -> T:
    """Run copies to a device to their end, beside the work of the default stream.

    Streams of SM shares do not wait for the default one, and a copy from ordinary memory waits for
    all work of its stream before it begins. Any thread.
    """
    if device.type != "cuda":
        return copy()
    stream = _copy_stream(device)
    with torch.cuda.stream(stream):
        value = copy()
        stream.synchronize()
    return value


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDevice:
    """One device.

    Attributes:
        torch: with its number in this process.
        uuid: of a GPU, for `BrokerClient.connect`; empty: the CPU.
        context_bytes: of the device, for this process's CUDA context; 0: it has none.
        budgeted: whether its allocator has to keep to what the node's budget leaves it.
    """

    torch: torch.device
    uuid: str
    context_bytes: int = 0
    budgeted: bool = False

    @classmethod
    def of(cls, deployment: Deployment, participant: Participant) -> WorkerDevice:
        """The deployment says which of the GPUs that its process sees. Opens its context.

        Raises:
            CudaMissing: there is no such GPU.
        """
        if deployment.device == "cpu":
            return cls(torch=torch.device("cpu"), uuid="")
        ordinal, visible = deployment.gpu(participant), torch.cuda.device_count()
        if ordinal >= visible:
            raise CudaMissing(
                f'device = "cuda": {participant} needs GPU {ordinal}, and its process sees '
                f'{visible}; lower train_tp, rollout_tp or dp, set rollout_gpus = "shared", or '
                "make more GPUs visible"
            )
        return cls(
            torch=torch.device("cuda", ordinal),
            uuid=device_uuid(ordinal),
            context_bytes=open_context(ordinal, lock=deployment.context_lock),
            budgeted=deployment.hbm_budget_gib is not None,
        )

    def enter(self) -> None:
        """Make it the calling thread's default; for the start of every thread that uses it."""
        if self.torch.type == "cuda":
            torch.cuda.set_device(self.torch)

    def give_back(self) -> None:
        """Return the memory that the process keeps for itself but does not use to the device.

        Between two steps: what one service has cached is what another one lacks.
        """
        if self.torch.type == "cuda":
            torch.cuda.empty_cache()

    def limit(self, size_bytes: int) -> None:
        """Have torch's allocator of a GPU take no more than so much of it. Any thread."""
        if self.torch.type == "cuda":
            total_bytes = torch.cuda.get_device_properties(self.torch).total_memory
            share = min(1.0, size_bytes / total_bytes)
            torch.cuda.set_per_process_memory_fraction(share, self.torch)

    async def watch(self) -> None:
        """Until cancelled. Raises DeviceLost once this process cannot use its GPU any more."""
        if self.torch.type == "cuda":
            await watch(self.torch.index)
        else:
            await asyncio.Event().wait()

    def wait(self) -> None:
        """Block until the calling thread's stream has done everything it was asked for.

        At the end of a job in the compute thread: what the job wrote may be sealed then, what it
        read may be released, and its time is the time that it took.
        """
        wait_for(self.torch)
