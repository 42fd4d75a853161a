"""When the prefix-encoder lets go of the weights, on a real broker."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from common.events import bodies
from common.ids import GroupId, Participant, Service
from common.step.plan import TRAIN_SPLIT
from common.step.tasks import Task
from common.step.view import StepView
from common.tensors.spec import DType, TensorSpec
from common.tensors.storage import StorageSpec
from common.worker.scope import StepScope
from common.worker.weights import POLICY_WEIGHTS, REFERENCE_VERSION, REFERENCE_WEIGHTS
from services.prefix_encoder.ahead import AheadStore
from services.prefix_encoder.ahead_step import AheadStep
from services.prefix_encoder.holds import WeightHolds
from tests.unit.prefix_encoder.test_ahead import loaded
from tests.unit.step.test_schedule import DONE, REWARDED, event, generated, plan
from tests.unit.worker.conftest import CPU, ENCODER, RUN, broker, mortal_broker, started

__all__ = ["broker", "mortal_broker", "started"]

LEARNER = Participant(service=Service.LEARNER)
FLAT = TensorSpec(name="flat", dtype=DType.FLOAT32, shape=(4,))


class Holdings:
    """An epoch's holds in this process, and what the broker knows of them."""

    def __init__(self, broker, scope, weights, reference) -> None:
        self._broker = broker
        self.scope = scope
        self._reference = reference
        self.view = scope.view
        self.holds = WeightHolds(scope, weights, reference)

    def accumulate(self) -> None:
        for body in (generated(), REWARDED, DONE):
            assert self.view.apply(event(body, 0))

    async def held(self) -> set[str]:
        # An answer to this comes behind everything that was sent before.
        (await self._reference.hold_read(REFERENCE_VERSION, timeout_s=5)).release()
        entries = (await self._broker.ledger()).entries
        return {entry.name for entry in entries if str(ENCODER) in entry.holders}


@pytest.fixture
async def holdings(broker):
    learner, encoder = await broker.join(LEARNER), await broker.join(ENCODER)
    read, written = [], []
    for name in (POLICY_WEIGHTS, REFERENCE_WEIGHTS):
        spec = StorageSpec(tensors=(FLAT,), readers=(ENCODER,), writers=(LEARNER,))
        written.append(await learner.open_storage(RUN, name, create=spec))
        writing = await written[-1].hold_write(REFERENCE_VERSION, timeout_s=5)
        await writing.publish()
        writing.release()
        read.append(await encoder.open_storage(RUN, name, create=spec))
    with ThreadPoolExecutor(1) as compute:
        scope = StepScope(
            StepView(plan(groups=1, ahead=1), needs_reference=False),
            participant=ENCODER,
            broker=encoder,
            compute=compute,
            device=CPU,
            publish=lambda _: pytest.fail("nothing is to be told"),
            spawn=lambda *_: None,
        )
        yield Holdings(broker, scope, *read)
        scope.close()
    for storage in (*read, *written):
        storage.close()


async def test_the_update_may_begin_once_every_group_is_accumulated(holdings):
    await holdings.holds.hold_policy()
    holdings.holds.advance()
    assert POLICY_WEIGHTS in await holdings.held()
    holdings.accumulate()
    holdings.holds.advance()
    assert POLICY_WEIGHTS not in await holdings.held()
    assert not holdings.holds.has_policy


async def test_the_update_waits_for_a_job_ahead_and_no_longer(holdings):
    await holdings.holds.hold_policy()
    with holdings.holds.reading_ahead():
        holdings.accumulate()
        holdings.holds.advance()
        assert POLICY_WEIGHTS in await holdings.held()
    assert POLICY_WEIGHTS not in await holdings.held()


@pytest.mark.parametrize("closed", [False, True])
async def test_work_ahead_holds_the_reference_only_while_sequences_decode(holdings, closed):
    """It may come to its turn when the window has closed and the weights are away."""
    holdings.view.apply(event(bodies.WindowOpened()))
    if closed:
        body = bodies.WindowClosed(decode_iterations=1, response_tokens=1)
        holdings.view.apply(event(body))
    store = AheadStore(limit_bytes=0, reference_limit=None)
    store.put((TRAIN_SPLIT, 1), loaded(0))
    forwards = SimpleNamespace(reference_prefix=lambda prompt, vision: None)
    ahead = AheadStep(SimpleNamespace(ahead=store), holdings.scope, holdings.holds, forwards)
    await holdings.holds.hold_policy()
    await ahead.run(Task.AHEAD_REFERENCE, GroupId(0), "")
    assert (REFERENCE_WEIGHTS in await holdings.held()) is not closed
