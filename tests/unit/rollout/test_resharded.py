"""Weights of a rollout of another degree than training's, on a real broker."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.ids import Participant, RunId, Service, WeightsVersion
from common.layouts.node import gatherers, node_plan, training_sharing
from common.step.partners import Partners
from common.step.place import Place
from common.tensors.errors import StaleVersion
from common.tensors.views import tensor_view
from common.vlm.parallel.model import config_shape
from common.vlm.parallel.shards import rank_layout, shards
from common.vlm.parallel.state import take_shard
from common.vlm.tiny import tiny_config
from common.weights.placed import placed
from common.weights.places import WeightPlaces
from common.worker.context import RunContext
from common.worker.weights import FLAT, POLICY_WEIGHTS, ROLLOUT_WEIGHTS, flat_spec, policy_shape
from services.rollout.resharded import ReshardedWeights
from tests.integration.runs.recipes import recipe

TRAIN, ROLLOUT_RANKS = 2, 1
PARTNERS = Partners({Service.LEARNER: TRAIN, Service.ROLLOUT: ROLLOUT_RANKS})
ROLLOUT = Participant(service=Service.ROLLOUT)
LEARNERS = PARTNERS.all(Service.LEARNER)
REPLICATED = replace(PARTNERS, replicas={Service.LEARNER: 2, Service.ROLLOUT: 4})
READERS = REPLICATED.everyone(Service.ROLLOUT)
V1, V2 = WeightsVersion(1), WeightsVersion(2)
SOON_S = 10.0


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config().to_dict()))
    return tmp_path


class Training:
    """The learner's ranks: a storage each."""

    def __init__(self, shape, partners=PARTNERS, *, replica=0) -> None:
        """Args: replica: whose ranks they are."""
        self.learners = partners.all(Service.LEARNER, replica=replica)
        self.replica = replica
        self.whole = shape.whole
        self.model = config_shape(shape.config)
        self.storages = []
        self.plan = node_plan(
            self.model,
            train_tp=TRAIN,
            rollout_tp=ROLLOUT_RANKS,
            element_bytes=4,
            train_replicas=partners.replica_count(Service.LEARNER),
            rollout_replicas=partners.replica_count(Service.ROLLOUT),
        )
        self.parts = [
            shards(self.whole, self.model, rank=rank, degree=TRAIN) for rank in range(TRAIN)
        ]

    async def create(self, broker) -> None:
        for rank, learner in enumerate(self.learners):
            gathering = gatherers(self.plan, rank, replica=self.replica)
            writers = [Participant(service=Service.ROLLOUT, rank=one) for one in gathering]
            spec = flat_spec(
                self.places(rank).elements,
                torch.float32,
                readers=READERS,
                writers=(learner, *writers),
            )
            name = f"{POLICY_WEIGHTS}/{learner.rank}" if learner.rank else POLICY_WEIGHTS
            client = next((c for c in broker.clients if c.participant == learner), None)
            client = client or await broker.join(learner)
            self.storages.append(await client.open_storage(RunId("run"), name, create=spec))

    async def publish(self, version, *, seed=None) -> dict[str, torch.Tensor]:
        """Write random weights, of one version the same. Returns: them, whole."""
        generator = torch.Generator().manual_seed(version if seed is None else seed)
        values = {
            one.name: torch.randn(one.shape, generator=generator) for one in self.whole.entries
        }
        holds = [await storage.hold_write(version) for storage in self.storages]
        for rank, (storage, hold) in enumerate(zip(self.storages, holds, strict=True)):
            for name, view in placed(tensor_view(storage, FLAT), self.places(rank)).items():
                view.copy_(take_shard(values[name], self.parts[rank][name]))
            await hold.publish()
        return values

    def close(self) -> None:
        for storage in self.storages:
            storage.close()

    def places(self, rank):
        layout = rank_layout(self.whole, self.parts[rank], rank=rank, degree=TRAIN)
        return WeightPlaces.planned(layout, training_sharing(self.plan, rank, replica=self.replica))

    def spoil_gaps(self):
        """Overwrite all of the first rank's storage that is no tensor of training."""
        flat = tensor_view(self.storages[0], FLAT)
        kept = {name: one.clone() for name, one in placed(flat, self.places(0)).items()}
        flat.fill_(float("nan"))
        for name, one in placed(flat, self.places(0)).items():
            one.copy_(kept[name])

    def harmed(self, values):
        """Tensors of training that are not what it has written."""
        return [
            name
            for rank, storage in enumerate(self.storages)
            for name, one in placed(tensor_view(storage, FLAT), self.places(rank)).items()
            if not torch.equal(one, take_shard(values[name], self.parts[rank][name]))
        ]


@asynccontextmanager
async def opened(broker, folder, *, who=ROLLOUT, partners=PARTNERS):
    """The rollout's weights, in a process of its own as far as the broker knows."""
    client = await broker.join(who)
    context = RunContext(
        run_id=RunId("run"),
        recipe=recipe(folder),
        run_dir=Path("runs"),
        participant=who,
        device=torch.device("cpu"),
        broker=client,
        ledger=None,
        resume_from=None,
        place=Place(rank=who.rank, replicas=partners.replica_count(Service.ROLLOUT)),
        partners=partners,
    )
    weights = await ReshardedWeights.open(context, policy_shape(context))
    try:
        yield weights, client
    finally:
        weights.close()


def shape_of_one(folder):
    context = RunContext(
        run_id=RunId("run"),
        recipe=recipe(folder),
        run_dir=Path("runs"),
        participant=LEARNERS[0],
        device=torch.device("cpu"),
        broker=None,
        ledger=None,
        resume_from=None,
    )
    return policy_shape(context)


@pytest.fixture
async def training(broker, folder):
    training = Training(shape_of_one(folder))
    await training.create(broker)
    yield training
    training.close()


def same(weights, values):
    return [name for name, one in values.items() if not torch.equal(weights.tensors[name], one)]


async def test_each_version_is_copied_once_and_read_whole(broker, folder, training):
    async with opened(broker, folder) as (weights, _):
        addresses = {name: one.data_ptr() for name, one in weights.tensors.items()}
        for version in (V1, V2):
            values = await training.publish(version)
            with await weights.hold_read(version) as hold:
                assert same(weights, values) == training.harmed(values) == []
                done = hold.refreshed
                assert done.alias_bytes > done.gather_bytes > done.rebuild_bytes > 0
                with await weights.hold_read(version) as again:
                    assert again.refreshed.gather_bytes == again.refreshed.rebuild_bytes == 0
        assert addresses == {name: one.data_ptr() for name, one in weights.tensors.items()}


async def test_an_update_waits_until_its_readers_have_let_go(broker, folder, training):
    async with opened(broker, folder) as (weights, _):
        values = await training.publish(V1)
        hold = await weights.hold_read(V1)
        update = asyncio.create_task(training.publish(V2))
        await asyncio.sleep(0.1)
        assert not update.done()
        assert same(weights, values) == []
        hold.release()
        async with asyncio.timeout(SOON_S):
            values = await update
        with pytest.raises(StaleVersion):
            await weights.hold_read(V1)
        with await weights.hold_read(V2):
            assert same(weights, values) == []


async def test_two_who_want_a_version_at_once_have_it_copied_once(broker, folder, training):
    async with opened(broker, folder) as (weights, _):
        await training.publish(V1)
        async with asyncio.timeout(SOON_S):
            holds = await asyncio.gather(*(weights.hold_read(V1) for _ in range(3)))
        assert sorted(one.refreshed.gather_bytes > 0 for one in holds) == [False, False, True]
        for hold in holds:
            hold.release()


async def test_what_a_rank_that_died_has_half_copied_is_copied_again(broker, folder, training):
    values = await training.publish(V1)
    async with opened(broker, folder) as (weights, client):
        (await weights.hold_read(V1)).release()
        own = await client.open_storage(RunId("run"), ROLLOUT_WEIGHTS)
        await own.hold_write(V1)
        tensor_view(own, FLAT).zero_()
        training.spoil_gaps()
        await client.close()
        own.close()
    broker.clients.remove(client)
    async with opened(broker, folder) as (weights, _):
        with await weights.hold_read(V1) as hold:
            assert hold.refreshed.gather_bytes > hold.refreshed.rebuild_bytes > 0
            assert same(weights, values) == training.harmed(values) == []


async def test_training_writes_in_no_gap(broker, folder, training):
    """As when its ranks restore a version after the death of one."""
    async with opened(broker, folder) as (weights, _):
        await training.publish(V1)
        (await weights.hold_read(V1)).release()
        for storage in training.storages:
            (await storage.hold_write(V2)).release()
        values = await training.publish(V1)
        with await weights.hold_read(V1) as hold:
            assert hold.refreshed.gather_bytes == hold.refreshed.rebuild_bytes == 0
            assert same(weights, values) == training.harmed(values) == []


async def test_a_version_that_comes_again_is_not_taken_for_the_one_before(broker, folder, training):
    """As after a return to a checkpoint, in a replica without a group in the steps between."""
    async with opened(broker, folder) as (weights, _):
        await training.publish(V2)
        (await weights.hold_read(V2)).release()
        await training.publish(V1)
        weights.forget()
        values = await training.publish(V2, seed=3)
        with await weights.hold_read(V2) as hold:
            assert hold.refreshed.gather_bytes > hold.refreshed.rebuild_bytes > 0
            assert same(weights, values) == training.harmed(values) == []


async def test_nor_in_a_process_that_has_just_started(broker, folder, training):
    async with opened(broker, folder) as (weights, client):
        await training.publish(V1)
        (await weights.hold_read(V1)).release()
        await client.close()
    broker.clients.remove(client)
    values = await training.publish(V1, seed=3)
    async with opened(broker, folder) as (weights, _):
        with await weights.hold_read(V1):
            assert same(weights, values) == []


async def test_what_waits_for_a_version_holds_nothing_when_it_is_given_up(broker, folder, training):
    async with opened(broker, folder) as (weights, _):
        await training.publish(V1)
        waiting = asyncio.create_task(weights.hold_read(V2))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(SOON_S):
            values = await training.publish(V2)
        with await weights.hold_read(V2):
            assert same(weights, values) == []


@pytest.mark.parametrize("rank", [2, 3])
async def test_a_replica_reads_the_replica_of_training_on_its_gpus(broker, folder, rank):
    """Of two, nobody else has weights here."""
    who = Participant(service=Service.ROLLOUT, rank=rank)
    second = Training(shape_of_one(folder), REPLICATED, replica=1)
    await second.create(broker)
    async with opened(broker, folder, who=who, partners=REPLICATED) as (weights, _):
        values = await second.publish(V1)
        with await weights.hold_read(V1):
            assert same(weights, values) == []
    second.close()
