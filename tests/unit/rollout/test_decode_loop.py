"""The loop that drives an engine, with the project's own engine on a tiny model."""

from __future__ import annotations

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from common.ids import Participant, Service
from common.rl.sampling import SamplingParams
from common.step.view import StepView
from common.vlm.bound import bound_model
from common.vlm.loading import suppressed_token_ids
from common.vlm.model import SplitModel
from common.vlm.tiny import tiny_config, tiny_prompt
from common.worker.device import WorkerDevice
from common.worker.live_decode import LiveDecode
from common.worker.scope import StepOver, StepScope
from services.rollout.decode_loop import DecodeLoop
from services.rollout.engines.native import NativeEngine
from services.rollout.engines.protocol import GroupRequest, StepSpec
from tests.unit.worker.conftest import step_plan

CONFIG = tiny_config(vocab_size=40, hidden_size=32, intermediate_size=48)
SAMPLES = 2
GROUPS = 4
PROMPTS = tuple(tiny_prompt(CONFIG, text_tokens=3 + g, seed=g) for g in range(GROUPS))
SOON_S = 20.0


def spec() -> StepSpec:
    return StepSpec(
        step=1,
        weights_version=1,
        seed=5,
        groups=tuple(range(GROUPS)),
        samples_per_group=SAMPLES,
        params=SamplingParams(
            max_new_tokens=6,
            stop_token_ids=tuple(range(8, 14)),
            suppressed_token_ids=suppressed_token_ids(CONFIG),
        ),
    )


@pytest.fixture(scope="module")
def model():
    return SplitModel(bound_model(CONFIG, dtype=torch.float32, train_vision=False).model)


@pytest.fixture
def engine(model):
    # Places for two groups: the others come in when one is complete.
    return NativeEngine(model, max_slots=2 * SAMPLES)


@pytest.fixture
def scope():
    with ThreadPoolExecutor(1) as compute:
        yield StepScope(
            StepView(step_plan(1, groups=GROUPS), needs_reference=False),
            participant=Participant(service=Service.ROLLOUT),
            broker=None,
            compute=compute,
            device=WorkerDevice(torch=torch.device("cpu"), uuid=""),
            publish=None,
            spawn=None,
        )


def request(group: int) -> GroupRequest:
    return GroupRequest(group=group, prompt=PROMPTS[group])


async def collect(loop, *, on_turn=lambda turn: None):
    turns = []
    async with asyncio.timeout(SOON_S):
        async for turn in loop.turns():
            turns.append(turn)
            on_turn(turn)
    return turns


def finished(turns):
    return [group for turn in turns for group in turn.finished]


async def test_every_group_is_admitted_in_order_and_finished_once(engine, scope):
    loop = DecodeLoop(engine, spec(), scope, live=LiveDecode.private())
    for group in range(GROUPS):
        loop.add(request(group))
    turns = await collect(loop)
    assert [group for turn in turns for group in turn.admitted] == list(range(GROUPS))
    order = [(group.decode_iteration, group.group) for group in finished(turns)]
    assert order == sorted(order)
    assert sorted(group for _, group in order) == list(range(GROUPS))
    assert all(turn.start_ns <= turn.end_ns for turn in turns)


async def test_the_memory_of_the_decode_is_free_when_it_is_over(engine, scope):
    loop = DecodeLoop(engine, spec(), scope, live=LiveDecode.private())
    for group in range(GROUPS):
        loop.add(request(group))
    held = []
    await collect(loop, on_turn=lambda turn: held.append(engine.memory_bytes))
    assert held[-1] > 0
    assert engine.memory_bytes == 0


async def test_the_window_is_announced_before_the_first_iteration(engine, scope):
    loop = DecodeLoop(engine, spec(), scope, live=LiveDecode.private())
    for group in range(GROUPS):
        loop.add(request(group))
    turns = await collect(loop)
    first = next(turn for turn in turns if turn.decoding)
    assert first.admitted == (0, 1)
    assert first.finished == ()


async def test_the_result_does_not_depend_on_when_groups_become_ready(model, scope):
    at_once = DecodeLoop(
        NativeEngine(model, max_slots=2 * SAMPLES), spec(), scope, live=LiveDecode.private()
    )
    for group in range(GROUPS):
        at_once.add(request(group))
    late = DecodeLoop(
        NativeEngine(model, max_slots=2 * SAMPLES), spec(), scope, live=LiveDecode.private()
    )

    async def feed():
        for group in reversed(range(GROUPS)):
            await asyncio.sleep(0.01)
            late.add(request(group))

    feeding = asyncio.create_task(feed())
    expected, actual = finished(await collect(at_once)), finished(await collect(late))
    await feeding
    assert [g.group for g in actual] == [g.group for g in expected]
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.logprobs, other.logprobs)
        assert one.decode_iteration == other.decode_iteration


async def test_a_dropped_group_is_not_waited_for(engine, scope):
    loop = DecodeLoop(engine, spec(), scope, live=LiveDecode.private())
    for group in (0, 2, 3):
        loop.add(request(group))
    dropping = asyncio.create_task(asyncio.sleep(0.05))
    dropping.add_done_callback(lambda _: loop.drop(1))
    turns = await collect(loop)
    await dropping
    assert sorted(group.group for group in finished(turns)) == [0, 2, 3]


async def test_all_groups_dropped_is_an_end(engine, scope):
    loop = DecodeLoop(engine, spec(), scope, live=LiveDecode.private())
    for group in range(GROUPS):
        loop.drop(group)
    turns = await collect(loop)
    assert finished(turns) == []
    assert not any(turn.decoding for turn in turns)


async def test_the_end_of_the_epoch_ends_the_loop(engine, scope):
    loop = DecodeLoop(engine, spec(), scope, live=LiveDecode.private())
    for group in range(GROUPS):
        loop.add(request(group))

    def end(turn):
        if turn.decoding:
            scope.end()

    with pytest.raises(StepOver):
        await collect(loop, on_turn=end)
    engine.abort()
    engine.release()


async def test_a_loop_that_waits_can_be_cancelled(engine, scope):
    loop = DecodeLoop(engine, spec(), scope, live=LiveDecode.private())
    waiting = asyncio.create_task(collect(loop))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    engine.abort()
    assert engine.finished


class Watched(LiveDecode):
    """Remembers every number of sequences that it was told."""

    def __init__(self) -> None:
        private = LiveDecode.private()
        super().__init__(private._words)
        self.told: list[int] = []

    def set_rows(self, rows: int) -> None:
        super().set_rows(rows)
        self.told.append(rows)


async def test_the_number_of_sequences_is_told_until_none_is_left(engine, scope):
    live = Watched()
    loop = DecodeLoop(engine, spec(), scope, live=live)
    for group in range(GROUPS):
        loop.add(request(group))
    await collect(loop)
    assert max(live.told) == 2 * SAMPLES
    assert live.rows == live.told[-1] == 0


async def test_iterations_and_admissions_are_counted(engine, scope):
    live = LiveDecode.private()
    counted = []
    for _ in range(2):
        loop = DecodeLoop(engine, spec(), scope, live=live)
        for group in range(GROUPS):
            loop.add(request(group))
        before = live.reading()
        turns = await collect(loop)
        after = live.reading()
        iterations = max(group.decode_iteration for group in finished(turns))
        assert after.iterations - before.iterations == iterations
        assert after.admissions - before.admissions == GROUPS
        assert turns[0].start_ns < after.ended_ns <= turns[-1].end_ns
        counted.append(after.iterations)
        engine.release()
    assert counted[1] == 2 * counted[0]  # it goes on counting in the next step


async def test_nothing_decodes_while_it_waits_for_a_group(engine, scope):
    live = LiveDecode.private()
    loop = DecodeLoop(engine, spec(), scope, live=live)
    loop.add(dataclasses.replace(request(0), limits=(1, 1)))
    loop.add(request(1))
    waited = []

    def feed(turn):
        if [group.group for group in turn.finished] == [0]:
            waited.append((engine.active_rows, live.rows))
            loop.add(request(2))
            loop.add(request(3))

    turns = await collect(loop, on_turn=feed)
    assert waited == [(SAMPLES, 0)]
    assert len(finished(turns)) == GROUPS
