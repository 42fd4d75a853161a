"""A participant in a process of its own: reads one order a line, writes one JSON answer a line.

Run as `python -m tests.integration.broker.participant SOCKET PARTICIPANT`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from common.ids import Epoch, GroupId, Incarnation, LeaseId, Participant, RunId, WeightsVersion
from common.tensors.client import BrokerClient
from common.tensors.spec import DType, Residency, TensorSpec
from common.tensors.storage import StorageSpec

RUN = RunId("run")
SIZE_BYTES = 1 << 16
OPTIMIZER_BYTES = 5 << 20
OPTIMIZER = StorageSpec(
    tensors=(TensorSpec(name="bytes", dtype=DType.UINT8, shape=(OPTIMIZER_BYTES,)),),
    readers=(Participant.parse("prefix-encoder/0"),),
    writers=(Participant.parse("learner/0"), Participant.parse("reference/0")),
    residency=Residency.SPILLABLE,
)
BYTES = TensorSpec(name="bytes", dtype=DType.UINT8, shape=(SIZE_BYTES,))


class Orders:
    """What the test can have done."""

    def __init__(self, client: BrokerClient) -> None:
        self.client = client
        self.kept: list[Any] = []

    async def allocate(self, consumer: str, text: str) -> dict[str, Any]:
        lease = await self.client.allocate(
            run_id=RUN,
            epoch=Epoch(1),
            group=GroupId(0),
            name="kv",
            tensors=[BYTES],
            consumers=[Participant.parse(consumer)],
        )
        view = lease.buffer("bytes")
        view[: len(text)] = text.encode()
        self.kept += [lease, view]
        return {"lease": lease.id}

    async def seal(self) -> dict[str, Any]:
        self.kept[0].seal()
        return {}

    async def overwrite(self, text: str) -> dict[str, Any]:
        self.kept[1][: len(text)] = text.encode()
        return {"inodes": inodes("rollplex:kv")}

    async def acquire(self, lease: int) -> dict[str, Any]:
        leases = await self.client.acquire([LeaseId(lease)], epoch=Epoch(1))
        self.kept += leases
        return {}

    async def read(self, length: int) -> dict[str, Any]:
        text = bytes(self.kept[-1].buffer("bytes")[:length]).decode()
        return {"text": text, "inodes": inodes("rollplex:kv")}

    async def write_weights(self, version: int, publish: bool) -> dict[str, Any]:
        writers = (self.client.participant,)
        readers = (Participant.parse("learner/0"),)
        spec = StorageSpec(tensors=(BYTES,), readers=readers, writers=writers)
        storage = await self.client.open_storage(RUN, "weights", create=spec)
        hold = await storage.hold_write(WeightsVersion(version))
        storage.buffer("bytes")[0] = version + 1
        if publish:
            await hold.publish()
        self.kept += [storage, hold]
        return {"created": storage.created}

    async def create_optimizer(self, seed: int) -> dict[str, Any]:
        """Open the spillable storage and, if it is new, write version 0."""
        storage = await self.client.open_storage(RUN, "optimizer", create=OPTIMIZER)
        if storage.created:
            hold = await storage.hold_write(WeightsVersion(0))
            storage.buffer("bytes")[:] = contents(seed)
            await hold.publish()
        self.kept += [storage, storage.buffer("bytes")]
        return {"created": storage.created, "version": storage.version, "torn": storage.torn}

    async def park(self) -> dict[str, Any]:
        return {"parked": self.kept[0].park()}

    async def check_optimizer(self, seed: int) -> dict[str, Any]:
        """Hold version 0 and compare, by the view that was made at first."""
        self.kept.append(await self.kept[0].hold_read(WeightsVersion(0)))
        return {"equal": bytes(self.kept[1]) == contents(seed)}


def contents(seed: int) -> bytes:
    return random.Random(seed).randbytes(OPTIMIZER_BYTES)


def inodes(name: str) -> list[int]:
    """Inodes of this process's mappings of that name."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[5] == f"/memfd:{name}":
            found.add(int(fields[4]))
    return sorted(found)


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
