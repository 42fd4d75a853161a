"""GPU storages that leave the device: it has the memory, and the contents come back."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from typing import TYPE_CHECKING
from urllib.request import urlopen

import pytest
import torch

from common.events import event_from_proto
from common.events.bodies import MemoryWanted
from common.ids import WeightsVersion
from common.tensors.cuda_events import finished
from common.tensors.errors import BrokerTimeout
from common.tensors.reaper import capturing
from common.tensors.spec import DType, Residency, TensorSpec
from common.tensors.storage import StorageSpec
from common.tensors.views import tensor_view
from protos.rollplex.v1 import broker_pb2 as pb
from services.broker.arena_cuda import MARGIN_BYTES
from tests.gpu.tensors.conftest import BUDGET_GIB, MIB, SLACK_BYTES, free_bytes, remote, until
from tests.gpu.tensors.participant import RUN
from tests.integration.broker.conftest import (
    ENCODER,
    LEARNER,
    Broker,
    connected,
    free_port,
    start_broker,
    stop,
)

if TYPE_CHECKING:
    from pathlib import Path

    from common.tensors.client import BrokerClient
    from common.tensors.storage import Storage

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

SIZE_BYTES = 1024 * MIB
ELEMENTS = SIZE_BYTES // 4
SPEC = StorageSpec(
    tensors=(TensorSpec(name="values", dtype=DType.FLOAT32, shape=(ELEMENTS,)),),
    readers=(),
    writers=(LEARNER, ENCODER),
    residency=Residency.SPILLABLE,
)
SPILL_S = 60.0


def pattern() -> torch.Tensor:
    """The same numbers each time."""
    return torch.arange(ELEMENTS, dtype=torch.float32, device="cuda").mul_(0.37)


async def written(client: BrokerClient) -> Storage:
    storage = await client.open_storage(RUN, "weights", create=SPEC)
    hold = await storage.hold_write(WeightsVersion(0))
    tensor_view(storage, "values").copy_(pattern())
    await finished()
    await hold.publish()
    return storage


async def in_state(broker: Broker, begins: str) -> None:
    async with asyncio.timeout(SPILL_S):
        while True:
            entries = (await broker.ledger()).entries
            if all(e.state.startswith(begins) for e in entries if e.name == "weights"):
                return
            await asyncio.sleep(0.002)


async def spilled(broker: Broker, storage: Storage) -> None:
    assert storage.park()
    await in_state(broker, "spilled")


async def test_the_device_has_the_memory_and_the_contents_come_back(broker: Broker) -> None:
    before = free_bytes()
    storage = await written(broker.clients[0])
    values = tensor_view(storage, "values")
    address, doubled = values.data_ptr(), torch.zeros(ELEMENTS, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with capturing(), torch.cuda.graph(graph):
        torch.mul(values, 2, out=doubled)
    torch.cuda.synchronize()
    for version in (1, 2, 3):
        resident = free_bytes()
        await spilled(broker, storage)
        assert free_bytes() > resident + SIZE_BYTES - SLACK_BYTES
        hold = await storage.hold_write(WeightsVersion(version))
        assert free_bytes() < resident + SLACK_BYTES
        assert values.data_ptr() == address == tensor_view(storage, "values").data_ptr()
        assert torch.equal(values, pattern())
        graph.replay()
        await finished()
        assert torch.equal(doubled, pattern() * 2)
        await hold.publish()
    del values, graph, doubled
    storage.close()
    await broker.stub.CloseRun(pb.CloseRunRequest(run_id="run"))
    await broker.settle(0)
    await until(lambda: free_bytes() > before - SLACK_BYTES, "the storage's memory is free")


async def test_contents_that_were_only_read_leave_again_without_a_copy(broker: Broker) -> None:
    storage = await written(broker.clients[0])
    resident = free_bytes()
    for _ in range(3):
        await spilled(broker, storage)
        assert free_bytes() > resident + SIZE_BYTES - SLACK_BYTES
        with await storage.hold_read(WeightsVersion(0)):
            assert torch.equal(tensor_view(storage, "values"), pattern())
    storage.close()


async def test_copies_are_as_fast_as_the_link(tmp_path: Path) -> None:
    ports = {"grpc_port": free_port(), "http_port": free_port()}
    started = start_broker(
        tmp_path, device="cuda", hbm_budget_gib=BUDGET_GIB, services={"broker": ports}
    )
    rounds = 5
    try:
        async with connected(started) as broker:
            storage = await written(broker.clients[0])
            for _ in range(rounds):
                await spilled(broker, storage)
                # Who may have written has it copied again.
                hold = await storage.hold_write(WeightsVersion(1))
                hold.release(untouched=True)
            storage.close()
            url = f"http://127.0.0.1:{ports['http_port']}/metrics"
            page = await asyncio.to_thread(lambda: urlopen(url, timeout=10).read().decode())
    finally:
        assert stop(started.process) == 0, started.log
    totals = dict(re.findall(r"^rollplex_(\w+)_total ([\d.e+-]+)$", page, re.MULTILINE))
    pinned = torch.empty(ELEMENTS, pin_memory=True)
    source = pattern()
    for name, copy in (
        ("spilled", lambda: pinned.copy_(source, non_blocking=True)),
        ("restored", lambda: source.copy_(pinned, non_blocking=True)),
    ):
        assert float(totals[f"{name}_bytes"]) == rounds * SIZE_BYTES
        ours = rounds * SIZE_BYTES / float(totals[f"{name}_seconds"]) / 1e9
        copy()
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(rounds):
            copy()
        torch.cuda.synchronize()
        plain = rounds * SIZE_BYTES / (time.perf_counter() - start_s) / 1e9
        sys.stdout.write(f"\n{name}: {ours:.1f} GB/s; a plain pinned copy: {plain:.1f} GB/s\n")


async def test_a_restore_waits_for_the_device(broker: Broker) -> None:
    storage = await written(broker.clients[0])
    await spilled(broker, storage)
    taken = torch.empty(free_bytes() - MARGIN_BYTES, dtype=torch.uint8, device="cuda")
    with pytest.raises(BrokerTimeout, match="the storage is spilled readable"):
        await storage.hold_read(WeightsVersion(0), timeout_s=1)
    holding = asyncio.create_task(storage.hold_read(WeightsVersion(0)))
    async with asyncio.timeout(SPILL_S):
        async for watched in broker.stub.WatchEvents(pb.WatchEventsRequest()):
            body = event_from_proto(watched.event).body
            if isinstance(body, MemoryWanted):
                break
    assert (body.device, body.size_bytes) == (storage.device, SIZE_BYTES)
    del taken
    torch.cuda.empty_cache()
    with await holding:
        assert torch.equal(tensor_view(storage, "values"), pattern())
    storage.close()


@pytest.mark.parametrize("parked", [False, True])
async def test_contents_survive_a_killed_participant(broker: Broker, parked: bool) -> None:
    async with remote(broker, ENCODER) as first:
        await first.order("open_spillable", elements=ELEMENTS)
        await first.order("write", version=0, value=2.5)
        if parked:
            assert (await first.order("park"))["parked"]
            await in_state(broker, "spilled")
        await first.kill()
    async with remote(broker, ENCODER) as second:
        await second.order("open_spillable", elements=ELEMENTS)
        assert (await second.order("park"))["parked"]
        await in_state(broker, "spilled")
        read = await second.order("read_storage", version=0)
        assert (read["smallest"], read["largest"]) == (2.5, 2.5)
