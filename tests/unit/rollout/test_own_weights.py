"""What the learner pushes and the rollout reads, over a real link and a real broker."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from common.events import Event, bodies
from common.ids import Participant, Service, WeightsVersion
from common.step.schedule import Schedule
from common.step.view import StepView
from common.tensors.views import tensor_view
from common.worker.push_link import PushLink
from common.worker.scope import StepScope
from common.worker.weights import FLAT, ROLLOUT_WEIGHTS
from services.learner.push import Pushed, WeightsPush, push_metrics, push_whole
from services.rollout.own_weights import OwnWeights, WrongVersion
from tests.integration.broker.conftest import broker, started
from tests.unit.step.test_schedule import plan
from tests.unit.worker.conftest import CPU, RUN

__all__ = ["broker", "started"]

ELEMENTS, TRAINED = 100, 70
BUCKET_BYTES = 64
"""Of 16 elements: five buckets of what trains."""
LEARNER, ROLLOUT = (Participant(service=s) for s in (Service.LEARNER, Service.ROLLOUT))
SETTLE_S = 0.1


class Pair:
    """Learner and rollout in one epoch, each with its own view of it."""

    def __init__(self, client, links, own, storage):
        self._client = client
        self.learner_link, self.rollout_link = links
        self.own, self.storage = own, storage
        self.held = tensor_view(storage, FLAT)
        self._compute = ThreadPoolExecutor(1)
        self.beside = []
        self.told = []

    def begin(self, version=0):
        wanted = plan(Schedule.DISAGGREGATED, epoch=1)
        self.views = [StepView(wanted, needs_reference=False) for _ in range(2)]
        assert wanted.weights_version == version
        self.learner, self.rollout = (
            StepScope(
                view,
                participant=who,
                broker=self._client,
                compute=self._compute,
                device=CPU,
                publish=self._publish,
                spawn=lambda _scope, _task, work: self.beside.append(asyncio.create_task(work())),
            )
            for who, view in zip((LEARNER, ROLLOUT), self.views, strict=True)
        )

    async def _publish(self, event: Event):
        self.told.append(event.body)
        for view in self.views:
            assert view.apply(event)

    def push(self, weights):
        return WeightsPush(
            self.learner, self.learner_link, version=WeightsVersion(1), weights=weights
        )

    def close(self):
        for scope in (self.learner, self.rollout):
            scope.end()
            self._compute.submit(scope.close).result()
        self._compute.shutdown()
        # Scopes and this refer to each other, and so to the mapping.
        vars(self).clear()


@pytest.fixture
async def pair(broker, tmp_path):

    def end(rank):
        return PushLink.join(
            tmp_path / "push",
            rank=rank,
            device=torch.device("cpu"),
            bucket_bytes=BUCKET_BYTES,
            timeout_s=30.0,
        )

    links = await asyncio.gather(*(asyncio.to_thread(end, rank) for rank in range(2)))
    client = await broker.join(ROLLOUT)
    context = SimpleNamespace(
        run_id=RUN,
        participant=ROLLOUT,
        ranks=(ROLLOUT,),
        broker=client,
        push=links[1],
        dtype=torch.float32,
        storage_name=str,
    )
    storage, own = await OwnWeights.open(context, SimpleNamespace(total_elements=ELEMENTS))
    made = Pair(client, links, own, storage)
    made.begin()
    yield made
    made.close()
    for link in links:
        link.close()
    storage.close()


async def caught_up(pair, version, weights):
    await asyncio.gather(
        push_whole(pair.learner_link, WeightsVersion(version), weights), pair.own.catch_up()
    )


async def test_a_rollout_begins_with_the_version_that_the_learner_has(pair):
    weights = torch.randn(ELEMENTS)
    with pytest.raises(WrongVersion, match="the rollout has version None"):
        pair.own.require(WeightsVersion(0))
    await caught_up(pair, 0, weights)
    pair.own.require(WeightsVersion(0))
    assert torch.equal(pair.held, weights)


async def test_a_version_that_is_there_is_not_sent_again(pair):
    weights = torch.randn(ELEMENTS)
    await caught_up(pair, 3, weights)
    await caught_up(pair, 3, torch.zeros(ELEMENTS))
    assert torch.equal(pair.held, weights)
    # an older one is, as when the learner has gone back to a checkpoint
    await caught_up(pair, 2, torch.ones(ELEMENTS))
    assert torch.equal(pair.held, torch.ones(ELEMENTS))
    with pytest.raises(WrongVersion, match="version 3; the rollout has version 2"):
        pair.own.require(WeightsVersion(3))


async def test_buckets_go_as_they_are_made(pair):
    old, new = torch.randn(ELEMENTS), torch.randn(ELEMENTS)
    await caught_up(pair, 0, old)
    push = pair.push(new[:TRAINED])
    await push.begin()
    assert pair.told == [bodies.PushBegan(weights_version=WeightsVersion(1), elements=TRAINED)]
    taking = asyncio.create_task(pair.own.take(pair.rollout, pair.views[1].push))
    push.made(40)
    await asyncio.sleep(SETTLE_S)
    assert torch.equal(pair.held[:32], new[:32])
    assert torch.equal(pair.held[32:], old[32:])
    with pytest.raises(WrongVersion):
        pair.own.require(WeightsVersion(1))
    push.made(TRAINED)
    await taking
    push.advance()
    pushed = await push.end()
    assert pushed.size_bytes == TRAINED * 4
    assert pushed.seconds > 0
    assert pushed.wait_s >= 0
    assert torch.equal(pair.held, torch.cat([new[:TRAINED], old[TRAINED:]]))
    pair.own.require(WeightsVersion(1))


async def test_weights_that_did_not_change_get_the_next_version_only(pair):
    weights = torch.randn(ELEMENTS)
    await caught_up(pair, 0, weights)
    push = pair.push(weights[:0])
    await push.begin()
    await pair.own.take(pair.rollout, pair.views[1].push)
    push.advance()
    assert (await push.end()).size_bytes == 0
    assert torch.equal(pair.held, weights)
    pair.own.require(WeightsVersion(1))


def test_of_several_ranks_bytes_add_up_and_the_slowest_counts():
    pushes = [Pushed(100, 0.5, 0.25), Pushed(101, 0.25, 0.0), Pushed(100, 0.25, 0.5)]
    assert push_metrics(pushes) == {"push_bytes": 301, "push_s": 0.5, "push_wait_s": 0.5}


async def test_a_push_that_breaks_off_leaves_no_version(pair, broker):
    await caught_up(pair, 0, torch.randn(ELEMENTS))
    push = pair.push(torch.randn(TRAINED))
    await push.begin()
    taking = asyncio.create_task(pair.own.take(pair.rollout, pair.views[1].push))
    push.made(40)
    await asyncio.sleep(SETTLE_S)
    pair.beside[0].cancel()
    with pytest.raises(Exception, match="has left the push"):
        await taking
    pair.rollout.end()
    pair.rollout.close()
    (state,) = {e.state for e in (await broker.ledger()).entries if e.name == ROLLOUT_WEIGHTS}
    assert state.startswith("torn")
