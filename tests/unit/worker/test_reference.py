"""Two processes' readers of the reference's weights, on a real broker that spills them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from common.events import bodies
from common.ids import Participant, Service
from common.step.plan import StepMode
from common.step.schedule import Schedule
from common.step.tasks import Task
from common.step.view import StepView
from common.tensors.spec import Residency
from common.tensors.views import tensor_view
from common.worker.reference import ReferenceWeights
from common.worker.scope import StepOver, StepScope
from common.worker.weights import FLAT, REFERENCE_VERSION, REFERENCE_WEIGHTS, flat_spec
from tests.unit.step.test_schedule import REWARDED, SCORED, event, generated, plan
from tests.unit.worker.conftest import CPU, ENCODER, RUN, SOON_S

REFERENCE = Participant(service=Service.REFERENCE)
GROUPS = 4
VALUES = torch.arange(1 << 16, dtype=torch.float32)
ROLLOUT_BUT_ONE = [(body, group) for group in range(GROUPS - 1) for body in (generated(), REWARDED)]
LAST_GROUP = [(body, GROUPS - 1) for body in (generated(), REWARDED)]
SCORES = [(SCORED, group) for group in range(GROUPS)]


class Reader:
    """One process: its mapping, and its part in the epoch under way."""

    def __init__(self, participant, client, storage) -> None:
        self.client = client
        self.storage = storage
        self.values = tensor_view(storage, FLAT)
        self.compute = ThreadPoolExecutor(1)
        self.beside: list[asyncio.Task[None]] = []
        self._participant = participant
        self.scope: StepScope

    def begin(self, step_plan) -> None:
        self.scope = StepScope(
            StepView(step_plan, needs_reference=True),
            participant=self._participant,
            broker=self.client,
            compute=self.compute,
            device=CPU,
            publish=lambda _: pytest.fail("nothing is to be told"),
            spawn=lambda _scope, _task, work: self.beside.append(asyncio.create_task(work())),
        )
        self.weights = ReferenceWeights(self.scope, self.storage, task=Task.REFERENCE_PREFIX)

    async def read(self) -> bool:
        async with self.weights.reading():
            done = await self.scope.run(
                Task.REFERENCE_PREFIX, lambda: torch.equal(self.values, VALUES)
            )
        return done.value

    def close(self) -> None:
        self.scope.end()
        self.compute.submit(self.scope.close).result()

    async def settled(self) -> None:
        for ended in await asyncio.gather(*self.beside, return_exceptions=True):
            assert ended is None or isinstance(ended, StepOver)
        self.beside.clear()


class Readers:
    def __init__(self, broker, *readers: Reader) -> None:
        self._broker = broker
        self.reference, self.encoder = self.all = readers
        self._epoch = 0

    def begin(self, schedule, mode=StepMode.TRAIN) -> None:
        self._epoch += 1
        for reader in self.all:
            reader.begin(plan(schedule, groups=GROUPS, mode=mode, epoch=self._epoch))

    def see(self, *seen) -> None:
        for reader in self.all:
            for body, group in seen:
                assert reader.scope.view.apply(event(body, group, epoch=self._epoch))
                reader.weights.advance()

    def close(self) -> None:
        for reader in self.all:
            reader.close()

    async def state(self) -> str:
        """Once everything that was sent has had its effect, moves under way included."""
        for reader in self.all:
            await reader.settled()
        async with asyncio.timeout(SOON_S):
            while True:
                # An answer to this comes behind everything that was sent before.
                for reader in self.all:
                    await reader.client.reserve(RUN, "order", 0)
                entries = (await self._broker.ledger()).entries
                (state,) = {e.state for e in entries if e.name == REFERENCE_WEIGHTS}
                if not state.startswith(("spilling", "restoring")):
                    return state
                await asyncio.sleep(0.005)


async def opened(broker, residency):
    reference, encoder = await broker.join(REFERENCE), await broker.join(ENCODER)
    spec = flat_spec(
        len(VALUES),
        VALUES.dtype,
        readers=(REFERENCE, ENCODER),
        writers=(REFERENCE,),
        residency=residency,
    )
    written = await reference.open_storage(RUN, REFERENCE_WEIGHTS, create=spec)
    hold = await written.hold_write(REFERENCE_VERSION)
    tensor_view(written, FLAT).copy_(VALUES)
    await hold.publish()
    read = await encoder.open_storage(RUN, REFERENCE_WEIGHTS)
    readers = (Reader(REFERENCE, reference, written), Reader(ENCODER, encoder, read))
    return Readers(broker, *readers)


@pytest.fixture(params=[Residency.SPILLABLE])
async def readers(broker, request):
    readers = await opened(broker, request.param)
    yield readers
    readers.close()
    for reader in readers.all:
        await reader.settled()
        reader.compute.shutdown()
        reader.storage.close()
        # The fixture's value outlives the test, and a view keeps its memory mapped.
        del reader.values


async def test_serial_gives_them_up_beside_the_decode_and_after_the_scores(readers):
    readers.begin(Schedule.SERIAL)
    assert await readers.state() == "spilled readable(v0)"
    readers.see((bodies.WindowOpened(), None), *ROLLOUT_BUT_ONE[:-2])
    assert await readers.state() == "spilled readable(v0)"
    readers.see(*ROLLOUT_BUT_ONE[-2:])
    # They are back before anybody has asked for a hold.
    assert await readers.state() == "readable(v0)"
    readers.see(*LAST_GROUP, (bodies.WindowClosed(decode_iterations=1, response_tokens=1), None))
    assert await readers.encoder.read()
    assert await readers.reference.read()
    readers.see(*SCORES[:-1])
    assert await readers.state() == "readable(v0)"
    readers.see(SCORES[-1])
    assert await readers.state() == "spilled readable(v0)"


@pytest.mark.parametrize("schedule", [Schedule.ROLLPLEX, Schedule.FUSED])
async def test_the_overlapped_schedules_give_them_up_between_scores_and_window(readers, schedule):
    for _ in range(2):
        readers.begin(schedule)
        assert await readers.state() == "readable(v0)"
        assert await readers.encoder.read()
        readers.see(*ROLLOUT_BUT_ONE, *LAST_GROUP)
        assert await readers.reference.read()
        readers.see(*SCORES)
        assert await readers.state() == "spilled readable(v0)"
        readers.close()


async def test_they_stay_until_every_reader_has_let_go(readers):
    readers.begin(Schedule.SERIAL)
    readers.see(*ROLLOUT_BUT_ONE, *LAST_GROUP)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def job() -> bool:
        async with readers.encoder.weights.reading():
            begun.set()
            await go_on.wait()
            return torch.equal(readers.encoder.values, VALUES)

    working = asyncio.create_task(job())
    await begun.wait()
    readers.see(*SCORES)
    assert await readers.state() == "readable(v0)"
    go_on.set()
    assert await working
    assert await readers.state() == "spilled readable(v0)"


async def test_who_comes_before_they_are_back_waits(readers):
    readers.begin(Schedule.SERIAL)
    assert await readers.state() == "spilled readable(v0)"
    readers.see(*ROLLOUT_BUT_ONE, *LAST_GROUP)
    assert all(await asyncio.gather(readers.encoder.read(), readers.reference.read()))
    assert await readers.state() == "readable(v0)"


async def test_what_an_aborted_epoch_has_left_goes_in_an_evaluation_and_comes_back(readers):
    readers.begin(Schedule.ROLLPLEX)
    assert await readers.encoder.read()
    readers.close()
    assert await readers.state() == "readable(v0)"
    readers.begin(Schedule.ROLLPLEX, StepMode.EVAL)
    assert await readers.state() == "spilled readable(v0)"
    readers.close()
    readers.begin(Schedule.ROLLPLEX)
    assert await readers.state() == "readable(v0)"
    assert await readers.encoder.read()


async def test_a_parking_that_comes_too_late_does_nothing(readers):
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    busy = readers.encoder.compute.submit(
        lambda: asyncio.run_coroutine_threadsafe(stop.wait(), loop).result(SOON_S)
    )
    readers.begin(Schedule.SERIAL)
    # The compute thread comes to it only now that they are needed again.
    readers.see(*ROLLOUT_BUT_ONE, *LAST_GROUP)
    stop.set()
    await asyncio.wrap_future(busy)
    assert await readers.state() == "readable(v0)"
    assert await readers.encoder.read()


@pytest.mark.parametrize("readers", [Residency.PINNED], indirect=True)
async def test_weights_that_cannot_be_spilled_stay_and_are_held_to_the_end(readers):
    readers.begin(Schedule.SERIAL)
    readers.see(*ROLLOUT_BUT_ONE, *LAST_GROUP)
    assert await readers.encoder.read()
    readers.see(*SCORES)
    assert await readers.state() == "readable(v0)"
    assert not readers.encoder.beside
