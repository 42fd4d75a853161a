"""Storages in GPU memory: zero at first, one address for the run, graphs that outlive versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from common.ids import Epoch, WeightsVersion
from common.tensors.cuda_events import finished
from common.tensors.reaper import capturing
from common.tensors.spec import DType, Placement, TensorSpec
from common.tensors.storage import StorageSpec
from common.tensors.views import tensor_view
from protos.rollplex.v1 import broker_pb2 as pb
from tests.gpu.tensors.conftest import MIB, SLACK_BYTES, free_bytes, remote, until
from tests.gpu.tensors.participant import RUN
from tests.integration.broker.conftest import ENCODER, LEARNER, Broker

if TYPE_CHECKING:
    from common.tensors.storage import Storage

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

ELEMENTS = 4 * MIB


async def write(storage: Storage, version: int, value: float) -> None:
    hold = await storage.hold_write(WeightsVersion(version))
    tensor_view(storage, "values").fill_(value)
    await finished()
    await hold.publish()


async def test_versions_between_processes(broker: Broker) -> None:
    learner = broker.clients[0]
    async with remote(broker, ENCODER) as writer:
        made = await writer.order("create_storage", readers=["learner/0"], elements=ELEMENTS)
        assert (made["created"], made["largest"]) == (True, 0.0)
        storage = await learner.open_storage(RUN, "weights")
        values = tensor_view(storage, "values")
        for version in range(3):
            await writer.order("write", version=version, value=version + 0.5)
            with await storage.hold_read(WeightsVersion(version)):
                assert bool((values == version + 0.5).all())
        del values
        storage.close()


async def test_a_graph_sees_every_version_at_the_same_address(broker: Broker) -> None:
    learner = broker.clients[0]
    tensor = TensorSpec(name="values", dtype=DType.FLOAT32, shape=(ELEMENTS,))
    spec = StorageSpec(tensors=(tensor,), readers=(ENCODER,), writers=(LEARNER,))
    storage = await learner.open_storage(RUN, "weights", create=spec)
    values, output = tensor_view(storage, "values"), torch.zeros(ELEMENTS, device="cuda")
    await write(storage, 0, 1.0)
    graph = torch.cuda.CUDAGraph()
    with capturing(), torch.cuda.graph(graph):
        torch.mul(values, 2, out=output)
    again = await learner.open_storage(RUN, "weights")
    assert tensor_view(again, "values").data_ptr() == values.data_ptr()
    storage.close()
    for version in (1, 2):
        await write(again, version, float(version))
        with await again.hold_read(WeightsVersion(version)):
            graph.replay()
            await finished()
        assert bool((output == 2 * version).all())
    del graph, values
    again.close()


async def test_accumulators_and_optimizer_state_on_the_host(broker: Broker) -> None:
    learner, encoder = broker.clients[0], await broker.join(ENCODER)
    tensor = TensorSpec(name="values", dtype=DType.FLOAT32, shape=(ELEMENTS,))
    gradients = StorageSpec(tensors=(tensor,), readers=(), writers=(LEARNER, ENCODER))
    shared = await learner.open_storage(RUN, "gradients", create=gradients)
    for client in (learner, encoder):
        storage = await client.open_storage(RUN, "gradients")
        with await storage.hold_exclusive(Epoch(1)):
            tensor_view(storage, "values").add_(1)
            await finished()
        storage.close()
    assert bool((tensor_view(shared, "values") == 2).all())
    host = StorageSpec(tensors=(tensor,), readers=(), writers=(LEARNER,), placement=Placement.HOST)
    optimizer = await learner.open_storage(RUN, "optimizer", create=host)
    assert (optimizer.device, shared.device) == ("cpu", learner.device)
    assert tensor_view(optimizer, "values").device.type == "cpu"
    optimizer.close()
    shared.close()


async def test_a_closed_run_gives_the_storages_back(broker: Broker) -> None:
    learner, before = broker.clients[0], free_bytes()
    tensor = TensorSpec(name="values", dtype=DType.FLOAT32, shape=(256 * MIB,))
    spec = StorageSpec(tensors=(tensor,), readers=(), writers=(LEARNER,))
    storage = await learner.open_storage(RUN, "weights", create=spec)
    assert not tensor_view(storage, "values").any()
    assert free_bytes() < before - 1024 * MIB + SLACK_BYTES
    storage.close()
    await broker.stub.CloseRun(pb.CloseRunRequest(run_id="run"))
    await broker.settle(0)
    torch.cuda.empty_cache()
    await until(lambda: free_bytes() > before - SLACK_BYTES, "the storage's memory is free")
