"""Both ends of the link that weights are pushed on, over a real Gloo group."""

from __future__ import annotations

import asyncio

import pytest
import torch

from common.worker import push_link
from common.worker.push_link import PushBroken, PushLink

CPU = torch.device("cpu")
BUCKET_BYTES = 64
ELEMENTS = 50
SETTLE_S = 0.2
SOON_S = 5.0
LARGE = 1 << 24
"""Bytes; more than a socket takes while nobody reads."""


def end(rendezvous, rank, timeout_s=30.0):
    return PushLink.join(
        rendezvous, rank=rank, device=CPU, bucket_bytes=BUCKET_BYTES, timeout_s=timeout_s
    )


@pytest.fixture
async def ends(tmp_path):
    """Of the learner and of the rollout."""
    joining = [asyncio.to_thread(end, tmp_path / "push", rank) for rank in range(2)]
    learner, rollout = await asyncio.gather(*joining)
    yield learner, rollout
    learner.close()
    rollout.close()


async def test_weights_arrive_in_buckets(ends):
    learner, rollout = ends
    weights = torch.arange(ELEMENTS, dtype=torch.float32)
    received = torch.zeros(ELEMENTS + 1)
    cut = learner.buckets(ELEMENTS, weights.dtype)
    assert [len(weights[bucket]) for bucket in cut] == [16, 16, 16, 2]

    async def take():
        for bucket in rollout.buckets(ELEMENTS, received.dtype):
            await rollout.receive(received[bucket])

    async with asyncio.TaskGroup() as group:
        group.create_task(take())
        for bucket in cut:
            await learner.send(weights[bucket])
    assert torch.equal(received[:ELEMENTS], weights)
    assert received[ELEMENTS] == 0


async def test_numbers_go_both_ways(ends):
    learner, rollout = ends
    told, heard = await asyncio.gather(rollout.tell(-1), learner.hear())
    assert (told, heard) == (None, -1)
    assert (await asyncio.gather(learner.tell(7), rollout.hear()))[1] == 7


@pytest.mark.parametrize("waits", ["learner", "rollout"])
async def test_a_side_that_leaves_ends_the_wait_of_the_other(ends, waits):
    learner, rollout = ends
    buffer = torch.zeros(LARGE, dtype=torch.uint8)
    waiting = learner.send(buffer) if waits == "learner" else rollout.receive(buffer)
    task = asyncio.create_task(waiting)
    await asyncio.sleep(SETTLE_S)
    assert not task.done()
    (rollout if waits == "learner" else learner).close()
    with pytest.raises(PushBroken, match="has left the push"):
        async with asyncio.timeout(SOON_S):
            await task


async def test_a_closed_side_sends_nothing(ends):
    learner, _ = ends
    learner.close()
    learner.close()
    with pytest.raises(PushBroken, match="was closed"):
        await learner.send(torch.zeros(1))


async def test_what_goes_on_when_its_side_is_closed_has_not_arrived(ends):
    learner, rollout = ends
    task = asyncio.create_task(rollout.receive(torch.zeros(1)))
    await asyncio.sleep(SETTLE_S)
    rollout.close()
    await learner.send(torch.ones(1))
    with pytest.raises(PushBroken, match="closed meanwhile"):
        async with asyncio.timeout(SOON_S):
            await task


async def test_a_cancelled_wait_closes_the_link_and_ends_with_the_other_side(ends):
    learner, rollout = ends
    task = asyncio.create_task(rollout.receive(torch.zeros(LARGE, dtype=torch.uint8)))
    await asyncio.sleep(SETTLE_S)
    task.cancel()
    await asyncio.sleep(SETTLE_S)
    assert not task.done(), "the thread still writes to the tensor"
    learner.close()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(SOON_S):
            await task
    with pytest.raises(PushBroken, match="was closed"):
        await rollout.receive(torch.zeros(1))


async def test_a_transfer_waits_no_longer_than_it_may(tmp_path):
    joining = [asyncio.to_thread(end, tmp_path / "push", rank, 0.5) for rank in range(2)]
    learner, rollout = await asyncio.gather(*joining)
    with pytest.raises(PushBroken, match="has left the push"):
        async with asyncio.timeout(SOON_S):
            await rollout.hear()
    learner.close()
    rollout.close()


async def test_a_side_that_does_not_come_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr(push_link, "JOIN_TIMEOUT_S", 0.5)
    with pytest.raises(PushBroken, match="has not come"):
        await asyncio.to_thread(end, tmp_path / "push", 0)
