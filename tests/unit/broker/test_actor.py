"""The executor: what it does when memory, descriptors or the state itself fail."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from common.errors import FailedPrecondition, InvalidArgument
from common.events.bodies import ParticipantDied, ParticipantJoined, StepAborted, StepBegan
from common.ids import Epoch, Incarnation, RunId
from common.tensors.client import BrokerClient
from common.tensors.errors import ArenaFull, BrokerGone, StaleLease
from common.tensors.spec import DType, TensorSpec
from common.tensors.storage import StorageSpec
from protos.rollplex.v1 import broker_pb2 as pb
from services.broker.actor import BrokerActor
from services.broker.arena import BudgetedArena, Export, MemfdAllocation, MemfdArena
from tests.unit.broker.driver import LEARNER, ROLLOUT, RUN, pages, plan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from common.events import Event

CAPACITY_BYTES = 1 << 20


class PoorArena(MemfdArena):
    """An arena whose system has nothing left while `poor`."""

    poor = False
    mute = False

    def allocate(self, size_bytes: int, name: str, *, zeroed: bool) -> MemfdAllocation:
        if self.poor:
            raise OSError("Cannot allocate memory")
        allocation = super().allocate(size_bytes, name, zeroed=zeroed)
        if self.mute:
            allocation.export = no_descriptor
        return allocation


def no_descriptor(*, writable: bool) -> Export:
    raise OSError("Too many open files")


class Node:
    """An actor on its socket, and what it announced."""

    def __init__(self, folder: Path) -> None:
        self.arena = PoorArena()
        self.announced: list[Event] = []
        self.death = asyncio.Event()
        self.path = folder / "broker.sock"
        self.actor = BrokerActor(
            arenas=[BudgetedArena(arena=self.arena, capacity_bytes=CAPACITY_BYTES)],
            socket_path=self.path,
            publish=self._publish,
        )

    def _publish(self, event: Event) -> int:
        self.announced.append(event)
        if isinstance(event.body, ParticipantDied):
            self.death.set()
        return len(self.announced)

    async def join(self, participant) -> BrokerClient:
        return await BrokerClient.connect(self.path, participant, Incarnation("life"))

    async def allocate(self, client: BrokerClient, *, size_pages: int = 1):
        return await client.allocate(
            run_id=RUN,
            epoch=Epoch(1),
            group=None,
            name="kv",
            tensors=pages(size_pages),
            consumers=[LEARNER],
        )


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    await node.actor.start()
    node.actor.open_run(RUN, Epoch(0))
    node.actor.begin_step(plan(1))
    yield node
    node.actor.close()
    node.actor.close()
    assert not node.path.exists()


@pytest_asyncio.fixture
async def learner(node: Node) -> AsyncIterator[BrokerClient]:
    client = await node.join(LEARNER)
    yield client
    await client.close()


async def test_no_memory_is_an_error_with_the_ledger(node: Node, learner: BrokerClient) -> None:
    node.arena.poor = True
    with pytest.raises(ArenaFull, match="no memory: 4096 bytes for kv on cpu") as caught:
        await node.allocate(learner)
    assert "arena: 1048576 bytes" in caught.value.ledger
    spec = StorageSpec(tensors=pages(1), readers=(ROLLOUT,), writers=(LEARNER,))
    rollout = await node.join(ROLLOUT)
    attaching = asyncio.create_task(rollout.open_storage(RUN, "weights", timeout_s=10))
    await asyncio.sleep(0.02)
    with pytest.raises(ArenaFull, match="the system gave no memory"):
        await learner.open_storage(RUN, "weights", create=spec)
    with pytest.raises(ArenaFull, match="the system gave no memory"):
        await attaching
    assert node.actor.ledger().used_bytes == 0
    node.arena.poor = False
    assert (await learner.open_storage(RUN, "weights", create=spec)).created
    (await node.allocate(learner)).abandon("a test")
    await rollout.close()


async def test_no_descriptor_ends_the_session_and_nothing_leaks(
    node: Node, learner: BrokerClient
) -> None:
    node.arena.mute = True
    with pytest.raises(BrokerGone):
        await node.allocate(learner)
    assert node.actor.ledger().used_bytes == 0
    assert not node.actor.failed.is_set()


async def test_broken_state_is_reported(node: Node, learner: BrokerClient, monkeypatch) -> None:
    def broken(event: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(node.actor._state, "handle", broken)
    calling = asyncio.create_task(node.allocate(learner))
    async with asyncio.timeout(10):
        await node.actor.failed.wait()
    assert isinstance(node.actor.failure, KeyError)
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)


async def test_what_the_node_is_told(node: Node, learner: BrokerClient) -> None:
    await learner.close()
    async with asyncio.timeout(10):
        await node.death.wait()
    assert node.actor.begin_step(plan(1)) == 1
    node.actor.abort_step(RUN, Epoch(1), "a death")
    bodies = [event.body for event in node.announced]
    room = {"cpu": node.actor.ledger().arena("cpu").capacity_bytes}
    assert bodies[0] == StepBegan(plan=plan(1), lease_room_bytes=room)
    assert bodies[1] == ParticipantJoined(participant=LEARNER, pid=os.getpid(), incarnation="life")
    assert isinstance(bodies[2], ParticipantDied)
    assert bodies[3:] == [StepAborted(reason="a death")]
    assert {(event.run_id, event.epoch) for event in node.announced} == {(RUN, Epoch(1))}
    assert not node.actor.admits(node.announced[0])


async def test_node_events_without_a_run(node: Node) -> None:
    node.actor.close_run(RUN)
    client = await node.join(LEARNER)
    await client.close()
    assert node.announced[-1].run_id == RunId("")


async def test_bad_values_are_refused_by_name(node: Node, learner: BrokerClient) -> None:
    for values, text in (
        ({"consumers": ["nobody"]}, "'nobody' names no participant"),
        ({"residency": "heap"}, "residency 'heap'; legal are pinned, phase, spillable"),
        ({"placement": "moon"}, "placement 'moon'; legal are host, device"),
    ):
        request = pb.Allocate(run_id=RUN, epoch=1, name="kv", residency="phase")
        tensor = request.tensors.add()
        tensor.name, tensor.dtype = "bytes", DType.UINT8
        request.MergeFrom(pb.Allocate(**values))
        with pytest.raises(InvalidArgument, match=text):
            await learner._connection.ask(pb.BrokerRequest(allocate=request), timeout_s=5)


async def test_something_else_in_the_sockets_place(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.path.write_text("a file")
    with pytest.raises(FailedPrecondition, match="exists and is no socket"):
        await node.actor.start()
    assert node.path.read_text() == "a file"


async def test_replies_are_sent_when_the_reader_catches_up(
    node: Node, learner: BrokerClient
) -> None:
    # More than a socket buffer of replies before the client reads the first one.
    wide = [
        TensorSpec(name=f"{i:03}-{'x' * 200}", dtype=DType.BOOL, shape=(1,)) for i in range(100)
    ]
    calls = [
        learner.allocate(
            run_id=RUN, epoch=Epoch(1), group=None, name="kv", tensors=wide, consumers=[LEARNER]
        )
        for _ in range(40)
    ]
    leases = await asyncio.gather(*calls)
    assert len({lease.id for lease in leases}) == 40
    assert learner.end_epoch(Epoch(1)) == 40
    with pytest.raises(StaleLease):
        await learner.acquire([leases[0].id], epoch=Epoch(1))
