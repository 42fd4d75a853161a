"""Weights that are checked: what was away leaves again, and no change of the run waits for long."""

from __future__ import annotations

import asyncio

import pytest
import torch

from common.errors import FailedPrecondition
from common.events.bodies import ModelRole
from common.step.plan import StepMode
from common.step.schedule import Schedule
from common.tensors.spec import Residency
from common.tensors.views import tensor_view
from common.weights.checksums import checksums
from common.worker.checksums import checksum_weights
from common.worker.weights import FLAT, POLICY_WEIGHTS, REFERENCE_VERSION, flat_spec
from common.worker.work import ReadWeights
from tests.unit.worker.conftest import CPU, RUN, SOON_S, ScriptedRun
from tests.unit.worker.test_reference import REFERENCE, VALUES, opened

EXPECTED = checksums({"values": VALUES})


class Model(torch.nn.Module):
    """One parameter, which is a storage."""

    device = CPU.torch

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.values = torch.nn.Parameter(values, requires_grad=False)


def weights_of(reader, script):
    model = Model(reader.values)
    script.weights = (ReadWeights(role=ModelRole.REFERENCE, storage=reader.storage, model=model),)
    return ScriptedRun(script)


@pytest.fixture
async def readers(broker):
    readers = await opened(broker, Residency.SPILLABLE)
    yield readers
    readers.close()
    for reader in readers.all:
        await reader.settled()
        reader.compute.shutdown()
        reader.storage.close()
        del reader.values


async def test_weights_that_were_away_are_away_again(readers, script):
    readers.begin(Schedule.ROLLPLEX, StepMode.EVAL)
    for _ in range(2):
        assert await readers.state() == "spilled readable(v0)"
        for reader in readers.all:
            (found,) = await checksum_weights(weights_of(reader, script), REFERENCE_VERSION)
            assert found.checksums == EXPECTED
    assert await readers.state() == "spilled readable(v0)"
    script.weights = ()


async def test_weights_that_are_needed_stay(readers, script):
    readers.begin(Schedule.ROLLPLEX)
    assert await readers.state() == "readable(v0)"
    for reader in readers.all:
        await checksum_weights(weights_of(reader, script), REFERENCE_VERSION)
    assert await readers.state() == "readable(v0)"
    script.weights = ()


async def test_weights_that_come_to_be_needed_meanwhile_stay(readers, script):
    readers.begin(Schedule.SERIAL)
    assert await readers.state() == "spilled readable(v0)"
    storage = readers.encoder.storage
    with await storage.hold_read(REFERENCE_VERSION, passing=True):
        storage.prefetch()
    storage.park_again()
    assert await readers.state() == "readable(v0)"
    with await storage.hold_read(REFERENCE_VERSION, passing=True):
        # Its user is done with it, and cannot park it now.
        assert not storage.park()
    storage.park_again()
    assert await readers.state() == "spilled readable(v0)"


@pytest.mark.parametrize("change", ["configure", "release", "quiesce", "shut_down"])
async def test_a_check_that_waits_is_in_no_change_s_way(worker, script, change):
    await worker.configure()
    learner = await worker.broker.join(REFERENCE)
    spec = flat_spec(8, torch.float32, readers=(REFERENCE,), writers=(REFERENCE,))
    storage = await learner.open_storage(RUN, POLICY_WEIGHTS, create=spec)
    model = Model(tensor_view(storage, FLAT))
    script.weights = (ReadWeights(role=ModelRole.POLICY, storage=storage, model=model),)
    # Nobody publishes the version.
    waiting = worker.checksums()
    await worker.until(lambda: any("checksums" in name for name in worker.actor.running_tasks))
    at_once = worker.checksums()
    async with asyncio.timeout(SOON_S):
        await getattr(worker, change)()
        for check in (waiting, at_once):
            with pytest.raises(FailedPrecondition, match="its run changes"):
                await check
    script.weights = ()
    storage.close()
