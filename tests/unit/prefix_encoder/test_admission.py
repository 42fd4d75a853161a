"""Prefixes wait for room, and whatever the room is, the one that is due never does."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.events import bodies
from common.ids import GroupId, LeaseId
from common.step.schedule import Schedule
from common.step.tasks import Task
from common.step.view import StepView
from common.tensors.errors import ArenaFull, BrokerTimeout
from services.prefix_encoder.admission import Admission
from tests.unit.broker.driver import ENCODER, FAR_S, LEARNER, PAGE
from tests.unit.prefix_encoder.play import PEOPLE, PLACES, SIZES, Play, reserve_pages, undropped
from tests.unit.step.test_schedule import event, plan

ADMITS = Admission(SIZES, device="cpu", decoding_groups=PLACES)


@settings(max_examples=60, deadline=None)
@given(
    schedule=st.sampled_from(Schedule),
    tokens=st.lists(st.integers(2, 60), min_size=1, max_size=6),
    extra=st.sampled_from([0, 0, 1, 3, 10, 40]),
    drops=st.sets(st.integers(0, 5), max_size=2),
    deaths=st.lists(st.sampled_from(PEOPLE), max_size=1),
    rollouts=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_every_step_ends_and_frees_everything(
    schedule, tokens, extra, drops, deaths, rollouts, seed
):
    room_pages = reserve_pages(schedule, tokens, rollouts=rollouts) + extra
    play = Play(schedule, tokens, room_pages, ADMITS, rollouts=rollouts)
    chance = random.Random(seed)

    def disturb() -> None:
        for group in undropped(play, drops):
            if chance.random() < 0.1:
                play.drop(group)
                drops.discard(group)
        if deaths and chance.random() < 0.02:
            play.kill(deaths.pop())

    play.run(chance.choice, disturb)
    assert play.view.accumulated, (play.leases, play.running)
    assert play.drive.state.lease_states() == {}
    assert play.drive.used_pages == 0
    assert play.drive.state.next_deadline_ns() is None


@settings(max_examples=60, deadline=None)
@given(
    schedule=st.sampled_from(Schedule),
    tokens=st.lists(st.integers(2, 60), min_size=1, max_size=5),
    weights_pages=st.integers(1, 30),
    extra=st.sampled_from([0, 0, 1, 3, 10]),
    drops=st.sets(st.integers(0, 5), max_size=2),
    seed=st.integers(0, 2**32),
)
def test_so_it_does_in_the_room_that_spilled_reference_weights_leave(
    schedule, tokens, weights_pages, extra, drops, seed
):
    admits = Admission(
        SIZES, device="cpu", decoding_groups=PLACES, spilled_bytes=weights_pages * PAGE
    )
    room_pages = reserve_pages(schedule, tokens, weights_pages=weights_pages) + extra
    play = Play(schedule, tokens, room_pages, admits, weights_pages=weights_pages)
    chance = random.Random(seed)

    def disturb() -> None:
        for group in undropped(play, drops):
            if chance.random() < 0.1:
                play.drop(group)
                drops.discard(group)

    play.run(chance.choice, disturb)
    assert play.view.accumulated, (play.leases, play.running)
    assert play.drive.state.lease_states() == {}
    assert play.drive.used_pages == weights_pages  # on the device, or of the copy


def without_admission() -> Play:
    tokens = [30] * 5
    room_pages = reserve_pages(Schedule.ROLLPLEX, tokens)
    play = Play(Schedule.ROLLPLEX, tokens, room_pages, lambda *_: True)
    play.run(lambda moves: moves[0])
    return play


def test_without_admission_prefixes_fill_the_room_and_nothing_ends():
    play = without_admission()
    assert not play.view.accumulated
    (waiting,) = play.running.values()
    assert play.drive.waits(waiting.request)


def test_even_then_the_wait_ends_and_says_who_has_the_room():
    play = without_admission()
    (waiting,) = play.running.values()
    play.drive.pass_time(FAR_S)
    refusal = play.drive.refusal(waiting.request)
    assert isinstance(refusal, BrokerTimeout)
    assert f"{LEARNER} released it" in str(refusal)


def test_what_no_release_could_make_room_for_is_refused_at_once():
    play = Play(Schedule.SERIAL, [60], room_pages=2, admits=ADMITS)
    request = play.drive.allocate(ENCODER, LEARNER, size_pages=3)
    with pytest.raises(ArenaFull, match="waiting cannot help"):
        play.drive.answer(request)


@pytest.mark.parametrize(
    # 59 tokens: 5 pages of K/V for each prefix, 8 of gradients
    ("schedule", "spilled_pages", "pages"),
    [
        (Schedule.SERIAL, 0, 5 + 8),
        (Schedule.SERIAL, 4, 5 + 8 - 4),
        (Schedule.SERIAL, 10, 5),
        (Schedule.ROLLPLEX, 0, 5 + 8),
        (Schedule.ROLLPLEX, 2, 5 + 8 - 2),
        (Schedule.ROLLPLEX, 10, 5 + 5),
        (Schedule.FUSED, 0, 2 * 5 + 5 + 8),
        (Schedule.FUSED, 10, 2 * 5 + 5 + 8),
    ],
)
def test_a_step_that_can_never_end_is_refused_at_once(schedule, spilled_pages, pages):
    admits = Admission(
        SIZES, device="cpu", decoding_groups=PLACES, spilled_bytes=spilled_pages * PAGE
    )
    for missing_bytes in (0, 1):
        view = StepView(
            plan(schedule, groups=3),
            needs_reference=True,
            lease_room_bytes={"cpu": pages * PAGE - missing_bytes},
        )
        admits.require_room(view)
        for group in range(3):
            prepared = bodies.GroupPrepared(
                prompt_lease=LeaseId(1),
                prompt_tokens=60,
                vision_tokens=0,
                last_token=1,
                start_position=0,
            )
            assert view.apply(event(prepared, group))
        if missing_bytes:
            with pytest.raises(ArenaFull, match="bytes are not taken for the whole run"):
                admits.require_room(view)
        else:
            admits.require_room(view)


@pytest.mark.parametrize(("rollouts", "groups"), [(1, 2), (2, 4)])
def test_replicas_of_the_rollout_have_room_for_their_places_each(rollouts, groups):
    play = Play(Schedule.FUSED, [60] * 6, 200, ADMITS, rollouts=rollouts)
    play.view.lease_room_bytes = {"cpu": (groups * 5 + 5 + 8) * PAGE - 1}
    with pytest.raises(ArenaFull):
        ADMITS.require_room(told(play).view)
    play.view.lease_room_bytes = {"cpu": (groups * 5 + 5 + 8) * PAGE}
    ADMITS.require_room(play.view)


def told(play: Play) -> Play:
    """Prompts of a step are ready."""
    for group in range(len(play.tokens)):
        play.start(Task.PREPARE, group)
        play.finish(Task.PREPARE, group)
        play.deliver()
    return play


@given(
    tokens=st.lists(st.integers(2, 60), min_size=4, max_size=6),
    rollouts=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None)
def test_groups_of_all_replicas_are_trained_in_the_order_of_their_completion(
    tokens, rollouts, seed
):
    """And not in that of their events, which would be another one each time."""
    trained = []

    class Noted(Play):
        def start(self, task, group):
            if task is Task.RESPONSE_TRAIN:
                trained.append(self.view.everyone[group].completion)
            super().start(task, group)

    room_pages = reserve_pages(Schedule.FUSED, tokens, rollouts=rollouts)
    play = Noted(Schedule.FUSED, tokens, room_pages, ADMITS, rollouts=rollouts)
    play.run(random.Random(seed).choice)
    assert len(trained) == len(tokens)
    assert trained == sorted(trained)


@pytest.mark.parametrize("schedule", [Schedule.ROLLPLEX, Schedule.FUSED])
def test_with_room_enough_everything_runs_ahead(schedule):
    play = Play(schedule, [30] * 4, 200, ADMITS)
    for task in (Task.PREPARE, Task.POLICY_VISION):
        for group in range(4):
            play.start(task, group)
            play.finish(task, group)
            play.deliver()
    if schedule is Schedule.ROLLPLEX:
        play.start(Task.DECODE, 0)
    assert {group for task, group in play.ready() if task is Task.POLICY_PREFIX} == {0, 1, 2, 3}


def test_room_that_nobody_has_told_of_is_no_limit():
    view = StepView(plan(Schedule.ROLLPLEX, groups=2), needs_reference=True)
    assert ADMITS(view, set(), (Task.POLICY_PREFIX, GroupId(1)))
