"""A participant with torch in a process of its own: one JSON order a line, one JSON answer a line.

Run as `python -m tests.gpu.tensors.participant SOCKET PARTICIPANT`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.ids import Epoch, GroupId, Incarnation, LeaseId, Participant, RunId, WeightsVersion
from common.tensors.client import BrokerClient
from common.tensors.cuda_events import finished, recorded
from common.tensors.spec import DType, Placement, Residency, TensorSpec
from common.tensors.storage import StorageSpec
from common.tensors.views import tensor_view

if TYPE_CHECKING:
    from common.tensors.lease import Lease
    from common.tensors.storage import Hold, Storage

RUN = RunId("run")
CYCLES_PER_MS = 1_500_000
"""About; GPUs run at 1 to 2 GHz."""


def busy(milliseconds: float) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))


class Orders:
    """What the test can have done."""

    def __init__(self, client: BrokerClient) -> None:
        self.client = client
        self.lease: Lease | None = None
        self.view: torch.Tensor | None = None
        self.storage: Storage | None = None
        self.hold: Hold | None = None
        self.taken: torch.Tensor | None = None

    async def ready(self) -> dict[str, Any]:
        torch.ones(1, device="cuda").sum().item()
        return {"device": self.client.device, "pid": os.getpid()}

    async def allocate(self, consumers: list[str], elements: int) -> dict[str, Any]:
        self.lease = await self.client.allocate(
            run_id=RUN,
            epoch=Epoch(1),
            group=GroupId(0),
            name="kv",
            tensors=[TensorSpec(name="values", dtype=DType.BFLOAT16, shape=(elements,))],
            consumers=[Participant.parse(consumer) for consumer in consumers],
        )
        self.view = tensor_view(self.lease, "values")
        return {"lease": self.lease.id, "device": self.lease.device}

    async def fill(self, value: float, busy_ms: float = 0) -> dict[str, Any]:
        """Ask for it only: the kernels run when they run."""
        assert self.view is not None
        busy(busy_ms)
        self.view.fill_(value)
        return {}

    async def seal(self) -> dict[str, Any]:
        assert self.lease is not None
        await finished()
        self.lease.seal()
        return {}

    async def acquire(self, lease: int) -> dict[str, Any]:
        (self.lease,) = await self.client.acquire([LeaseId(lease)], epoch=Epoch(1))
        self.view = tensor_view(self.lease, "values")
        return {}

    async def read(self) -> dict[str, Any]:
        assert self.view is not None
        return {"first": self.view[0].item(), "last": self.view[-1].item()}

    async def release(self) -> dict[str, Any]:
        assert self.lease is not None
        event = recorded()
        self.view = None
        self.lease.release(after=event)
        return {}

    async def take(self, size_bytes: int) -> dict[str, Any]:
        """Get memory from torch's own allocator."""
        try:
            self.taken = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            return {"got": False}
        return {"got": True}

    async def create_storage(self, readers: list[str], elements: int) -> dict[str, Any]:
        tensor = TensorSpec(name="values", dtype=DType.FLOAT32, shape=(elements,))
        spec = StorageSpec(
            tensors=(tensor,),
            readers=tuple(map(Participant.parse, readers)),
            writers=(self.client.participant,),
            placement=Placement.DEVICE,
        )
        self.storage = await self.client.open_storage(RUN, "weights", create=spec)
        values = tensor_view(self.storage, "values")
        return {"created": self.storage.created, "largest": values.abs().max().item()}

    async def open_spillable(self, elements: int) -> dict[str, Any]:
        tensor = TensorSpec(name="values", dtype=DType.FLOAT32, shape=(elements,))
        spec = StorageSpec(
            tensors=(tensor,),
            readers=(),
            writers=(self.client.participant,),
            residency=Residency.SPILLABLE,
        )
        self.storage = await self.client.open_storage(RUN, "weights", create=spec)
        self.view = tensor_view(self.storage, "values")
        return {"created": self.storage.created}

    async def park(self) -> dict[str, Any]:
        assert self.storage is not None
        return {"parked": self.storage.park()}

    async def read_storage(self, version: int) -> dict[str, Any]:
        """By the view that was made when it was opened."""
        assert self.storage is not None
        assert self.view is not None
        with await self.storage.hold_read(WeightsVersion(version)):
            return {"smallest": self.view.min().item(), "largest": self.view.max().item()}

    async def write(self, version: int, value: float, publish: bool = True) -> dict[str, Any]:
        assert self.storage is not None
        self.hold = await self.storage.hold_write(WeightsVersion(version))
        tensor_view(self.storage, "values").fill_(value)
        await finished()
        if publish:
            await self.hold.publish()
        return {}


async def main(socket_path: str, participant: str) -> None:
    client = await BrokerClient.connect(
        Path(socket_path), Participant.parse(participant), Incarnation(str(os.getpid()))
    )
    orders = Orders(client)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        answer = await getattr(orders, order.pop("do"))(**order)
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
