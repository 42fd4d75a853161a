"""Leases in GPU memory: the same bytes in two processes, and memory that comes back."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch

from common.gpu.driver import device_uuid
from common.ids import Epoch, LeaseId, Participant
from common.tensors.cuda_events import finished, over, recorded
from common.tensors.errors import ArenaFull, LeaseMisuse, StaleLease
from common.tensors.reaper import capturing
from common.tensors.spec import DType, Placement, TensorSpec
from common.tensors.views import spec_of, tensor_view, tensor_views, torch_dtype
from protos.rollplex.v1 import broker_pb2 as pb
from tests.gpu.tensors.conftest import BUDGET_GIB, MIB, SLACK_BYTES, free_bytes, remote, until
from tests.gpu.tensors.participant import RUN, busy
from tests.integration.broker.conftest import ENCODER, LEARNER, ROLLOUT, Broker

if TYPE_CHECKING:
    from common.tensors.client import BrokerClient
    from common.tensors.lease import Lease

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

ELEMENTS = 64 * MIB
"""bfloat16: 128 MiB."""
PAGE = 2 * MIB


async def allocate(
    client: BrokerClient,
    *consumers: Participant,
    tensors: list[TensorSpec] | None = None,
    size_bytes: int = PAGE,
    **options: Any,
) -> Lease:
    whole = TensorSpec(name="values", dtype=DType.UINT8, shape=(size_bytes,))
    return await client.allocate(
        run_id=RUN,
        epoch=options.pop("epoch", Epoch(1)),
        group=None,
        name="kv",
        tensors=tensors or [whole],
        consumers=consumers,
        **options,
    )


async def test_two_processes_share_the_same_bytes(broker: Broker) -> None:
    learner = broker.clients[0]
    async with remote(broker, ENCODER) as producer:
        made = await producer.order("allocate", consumers=["learner/0"], elements=ELEMENTS)
        assert made["device"] == learner.device == device_uuid(0)
        await producer.order("fill", value=2.5, busy_ms=200)
        await producer.order("seal")
        (held,) = await learner.acquire([LeaseId(made["lease"])], epoch=Epoch(1))
        view = tensor_view(held, "values")
        assert (view.dtype, view.shape, view.device.type) == (torch.bfloat16, (ELEMENTS,), "cuda")
        assert bool((view == 2.5).all()), "the seal came before the bytes"
        await producer.order("fill", value=-1)
        assert (await producer.order("read"))["last"] == -1
        assert bool((view == -1).all()), "not the same memory"
        del view
        held.release()
    await broker.settle(0)


@pytest.mark.parametrize("dtype", list(DType))
async def test_every_dtype(broker: Broker, dtype: DType) -> None:
    learner, encoder = broker.clients[0], await broker.join(ENCODER)
    specs = [
        TensorSpec(name="before", dtype=DType.UINT8, shape=(3,)),
        TensorSpec(name="values", dtype=dtype, shape=(2, 3)),
        TensorSpec(name="scalar", dtype=dtype, shape=()),
        TensorSpec(name="empty", dtype=dtype, shape=(0, 5)),
    ]
    lease = await allocate(encoder, LEARNER, tensors=specs)
    wanted = torch.arange(6, device="cuda").view(2, 3).to(torch_dtype(dtype))
    tensor_view(lease, "values").copy_(wanted)
    tensor_view(lease, "scalar").fill_(1)
    await finished()
    lease.seal()
    (held,) = await learner.acquire([lease.id], epoch=Epoch(1))
    views = tensor_views(held, ["values", "scalar", "empty"])
    assert torch.equal(views["values"], wanted)
    assert views["scalar"].item() == 1
    assert (views["empty"].shape, views["empty"].dtype) == ((0, 5), torch_dtype(dtype))
    assert spec_of("values", views["values"]).dtype is dtype
    with pytest.raises(LeaseMisuse, match="only tensors can be made of it"):
        held.buffer("values")
    del views
    held.release()
    await broker.settle(0)


async def test_released_memory_is_the_devices_again(broker: Broker) -> None:
    learner, encoder = broker.clients[0], await broker.join(ENCODER)
    before = free_bytes()
    lease = await allocate(encoder, LEARNER, size_bytes=1024 * MIB)
    tensor_view(lease, "values").fill_(1)
    await finished()
    lease.seal()
    (held,) = await learner.acquire([lease.id], epoch=Epoch(1))
    view = tensor_view(held, "values")
    assert free_bytes() < before - 1024 * MIB + SLACK_BYTES
    held.release()
    await asyncio.sleep(0.1)
    assert (await broker.ledger()).used_bytes == 1024 * MIB, "a view still refers to the bytes"
    assert view[-1].item() == 1
    del view
    await broker.settle(0)
    await until(lambda: free_bytes() > before - SLACK_BYTES, "the lease's memory is free")


async def test_another_process_can_have_what_was_released(broker: Broker) -> None:
    encoder = await broker.join(ENCODER)
    async with remote(broker, ROLLOUT) as other:
        lease = await allocate(encoder, LEARNER, size_bytes=2048 * MIB)
        size_bytes = free_bytes() + 1024 * MIB
        assert not (await other.order("take", size_bytes=size_bytes))["got"]
        lease.abandon("its memory is wanted elsewhere")
        await broker.settle(0)
        assert (await other.order("take", size_bytes=size_bytes))["got"]


async def test_nvml_sees_the_memory_go_and_come(broker: Broker) -> None:
    pynvml = pytest.importorskip("pynvml")
    encoder = await broker.join(ENCODER)
    pynvml.nvmlInit()
    try:
        gpu = pynvml.nvmlDeviceGetHandleByUUID(encoder.device)

        def used() -> int:
            return int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used)

        before = used()
        lease = await allocate(encoder, LEARNER, size_bytes=1024 * MIB)
        assert used() > before + 1024 * MIB - SLACK_BYTES
        lease.abandon("a test")
        await until(lambda: used() < before + SLACK_BYTES, "NVML sees the memory back")
    finally:
        pynvml.nvmlShutdown()


async def test_release_waits_for_the_kernels_and_blocks_nobody(broker: Broker) -> None:
    learner, encoder = broker.clients[0], await broker.join(ENCODER)
    for with_event in (True, False):
        lease = await allocate(encoder, LEARNER, size_bytes=64 * MIB)
        tensor_view(lease, "values").fill_(3)
        await finished()
        lease.seal()
        (held,) = await learner.acquire([lease.id], epoch=Epoch(1))
        busy(700)
        total = tensor_view(held, "values").sum(dtype=torch.int64)
        event = recorded()
        held.release(after=event if with_event else None)
        del held
        assert not event.query(), "release waited for the GPU"
        assert (await broker.ledger()).used_bytes == 64 * MIB, "freed under a running kernel"
        await over(event)
        assert total.item() == 3 * 64 * MIB
        await broker.settle(0)


async def test_a_lease_left_behind_is_given_back(broker: Broker) -> None:
    learner, encoder = broker.clients[0], await broker.join(ENCODER)
    lease = await allocate(encoder, LEARNER)
    lease.seal()
    view = tensor_view((await learner.acquire([lease.id], epoch=Epoch(1)))[0], "values")
    del lease
    gc.collect()
    assert (await broker.ledger()).used_bytes == PAGE
    del view
    gc.collect()
    await broker.settle(0)


async def test_an_epoch_ends_for_everybody(broker: Broker) -> None:
    learner, encoder = broker.clients[0], await broker.join(ENCODER)
    sealed = await allocate(encoder, LEARNER)
    sealed.seal()
    (held,) = await learner.acquire([sealed.id], epoch=Epoch(1))
    unsealed = await allocate(encoder, LEARNER)
    await broker.stub.AbortStep(pb.AbortStepRequest(run_id="run", epoch=1, reason="rollout/0 died"))
    with pytest.raises(StaleLease, match="aborted: rollout/0 died"):
        await allocate(encoder, LEARNER)
    await broker.begin(2)
    with pytest.raises(StaleLease, match="and was to be acquired under epoch 2"):
        await learner.acquire([held.id], epoch=Epoch(2))
    assert (await broker.ledger()).used_bytes == 2 * PAGE, "both are still mapped"
    assert (encoder.end_epoch(Epoch(1)), learner.end_epoch(Epoch(1))) == (1, 1)
    del held, unsealed
    await broker.settle(0)
    (await allocate(encoder, LEARNER, epoch=Epoch(2))).abandon("a test")


async def test_budget_and_ledger(broker: Broker) -> None:
    encoder = await broker.join(ENCODER)
    (free,) = [
        arena.free_bytes
        for arena in (await broker.ledger()).arenas
        if arena.device == encoder.device
    ]
    assert 0 < free < BUDGET_GIB << 30, "contexts are counted too"
    with pytest.raises(ArenaFull) as caught:
        await allocate(encoder, LEARNER, size_bytes=(BUDGET_GIB * 1024 + 2) * MIB)
    assert f"of {encoder.device}, {free} bytes are free" in str(caught.value)
    await encoder.reserve(RUN, "activations", free - PAGE)
    with pytest.raises(ArenaFull, match="prefix-encoder/0 gives it back"):
        await allocate(encoder, LEARNER, size_bytes=PAGE + 1)
    await encoder.reserve(RUN, "activations", 0)
    small = await allocate(encoder, LEARNER, size_bytes=1)
    ledger = await broker.ledger()
    assert [(arena.device, arena.used_bytes) for arena in ledger.arenas] == [
        ("cpu", 0),
        (encoder.device, PAGE),
    ]
    small.abandon("a test")


async def test_host_placement_is_host_memory(broker: Broker) -> None:
    learner, encoder = broker.clients[0], await broker.join(ENCODER)
    lease = await allocate(encoder, LEARNER, placement=Placement.HOST, size_bytes=100)
    assert lease.device == "cpu"
    lease.buffer("values")[:] = bytes(range(100))
    lease.seal()
    (held,) = await learner.acquire([lease.id], epoch=Epoch(1))
    view = tensor_view(held, "values")
    assert (view.device.type, view[99].item()) == ("cpu", 99)
    with pytest.raises(LeaseMisuse, match="lies in host memory"):
        held.device_buffer("values")
    del view
    held.release()
    await broker.settle(0)


async def test_zero_when_asked_for(broker: Broker) -> None:
    encoder = await broker.join(ENCODER)
    for _ in range(3):
        lease = await allocate(encoder, LEARNER, size_bytes=256 * MIB, zero=True)
        view = tensor_view(lease, "values")
        assert not view.any()
        view.fill_(255)
        del view
        lease.abandon("a test")
        await broker.settle(0)


async def test_graphs_are_captured_while_leases_come_and_go(broker: Broker) -> None:
    encoder = await broker.join(ENCODER)
    stay = await allocate(encoder, LEARNER)
    go = await allocate(encoder, LEARNER)
    values = tensor_view(stay, "values")
    values.fill_(1)
    await finished()
    graph = torch.cuda.CUDAGraph()
    with capturing(), torch.cuda.graph(graph):
        values.add_(1)
        go.abandon("in the middle of a capture")
    for _ in range(3):
        graph.replay()
    await finished()
    assert bool((values == 4).all())
    await broker.settle(PAGE)
    del values, graph
    stay.abandon("a test")
    await broker.settle(0)
