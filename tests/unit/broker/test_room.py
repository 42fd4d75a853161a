"""Room: waiting in turn, refusals with the ledger, reservations."""

from __future__ import annotations

import pytest

from common.tensors.errors import ArenaFull, BrokerTimeout, UnknownRun
from common.tensors.spec import Placement
from services.broker import events
from tests.unit.broker.driver import ENCODER, LEARNER, PAGE, REFERENCE, ROLLOUT, RUN, Driver


@pytest.fixture
def drive() -> Driver:
    driver = Driver(capacity_pages=4)
    driver.begin(1)
    return driver


def reserve(drive: Driver, who, size_pages: int, name: str = "activations") -> int:
    return drive.ask(
        who,
        events.ReserveMemory,
        run_id=RUN,
        name=name,
        placement=Placement.DEVICE,
        size_bytes=size_pages * PAGE,
    )


def test_waits_for_room(drive: Driver) -> None:
    first = drive.lease(ENCODER, LEARNER, size_pages=3)
    request = drive.allocate(ENCODER, LEARNER, size_pages=2)
    assert drive.waits(request)
    drive.abandon(ENCODER, first)
    assert drive.answer(request) is not None
    assert drive.state.ledger().arena("cpu").peak_bytes == 3 * PAGE


def test_one_participants_requests_stay_in_order(drive: Driver) -> None:
    first = drive.lease(ENCODER, LEARNER, size_pages=3)
    large = drive.allocate(ENCODER, LEARNER, size_pages=2)
    small = drive.allocate(ENCODER, LEARNER, size_pages=1)
    assert drive.waits(large)
    assert drive.waits(small)
    drive.abandon(ENCODER, first)
    assert list(drive.answers).index(large) < list(drive.answers).index(small)


def test_a_request_that_fits_passes_one_of_another_participant_that_does_not(
    drive: Driver,
) -> None:
    # The encoder's next K/V does not fit before the learner has trained on the last one, which
    # takes a lease of gradients: keeping it back would stop both for ever.
    kv = drive.sealed(ENCODER, LEARNER, size_pages=3)
    drive.acquire(LEARNER, kv)
    next_kv = drive.allocate(ENCODER, LEARNER, size_pages=3)
    gradients = drive.lease(LEARNER, ENCODER, size_pages=1)
    drive.release(LEARNER, kv)
    assert drive.answer(next_kv) is not None
    drive.seal(LEARNER, gradients)


def test_arrival_order_between_participants(drive: Driver) -> None:
    first = drive.lease(ENCODER, LEARNER, size_pages=4)
    early = drive.allocate(ROLLOUT, LEARNER, size_pages=3)
    late = drive.allocate(REFERENCE, LEARNER, size_pages=3)
    drive.abandon(ENCODER, first)
    assert drive.answer(early) is not None
    assert drive.waits(late)


def test_refused_at_once_where_waiting_cannot_help(drive: Driver) -> None:
    drive.lease(ENCODER, LEARNER)
    assert drive.answer(reserve(drive, LEARNER, 2)) is not None
    with pytest.raises(ArenaFull) as caught:
        drive.answer(drive.allocate(ENCODER, LEARNER, size_pages=3))
    assert f"wants {3 * PAGE} bytes: waiting cannot help" in str(caught.value)
    ledger = caught.value.ledger
    assert f"arena: {4 * PAGE} bytes, {3 * PAGE} used" in ledger
    assert "lease 1 epoch 1 group 7" in ledger
    assert "learner/0 gives it back" in ledger
    assert "prefix-encoder/0 seals it, learner/0 released it after decode" in ledger


def test_a_waiting_request_becomes_hopeless(drive: Driver) -> None:
    lease = drive.lease(ENCODER, LEARNER, size_pages=1)
    request = drive.allocate(ROLLOUT, LEARNER, size_pages=4)
    assert drive.waits(request)
    reserve(drive, LEARNER, 1)
    with pytest.raises(ArenaFull, match="waiting cannot help"):
        drive.answer(request)
    drive.abandon(ENCODER, lease)


def test_waiting_not_wanted(drive: Driver) -> None:
    drive.lease(ENCODER, LEARNER, size_pages=3)
    with pytest.raises(ArenaFull, match="waiting was not wanted"):
        drive.answer(drive.allocate(ENCODER, LEARNER, size_pages=2, wait=False))
    assert drive.answer(drive.allocate(ENCODER, LEARNER, size_pages=1, wait=False)) is not None


def test_deadline_shows_the_ledger_and_lets_the_next_one_in(drive: Driver) -> None:
    drive.lease(ENCODER, LEARNER, size_pages=3)
    large = drive.allocate(ENCODER, LEARNER, size_pages=2, timeout_s=1)
    small = drive.allocate(ENCODER, LEARNER, size_pages=1, timeout_s=100)
    drive.pass_time(1)
    with pytest.raises(BrokerTimeout, match="no room in time\narena: "):
        drive.answer(large)
    assert drive.answer(small) is not None


def test_dead_participants_requests_and_reservations_go(drive: Driver) -> None:
    drive.lease(ENCODER, LEARNER, size_pages=2)
    reserve(drive, ROLLOUT, 2)
    drive.allocate(ROLLOUT, LEARNER, size_pages=1)
    waiting = drive.allocate(REFERENCE, LEARNER, size_pages=1)
    drive.kill(ROLLOUT)
    assert drive.answer(waiting) is not None
    assert drive.used_pages == 3


def test_cancelled_allocation_lets_the_next_one_in(drive: Driver) -> None:
    drive.lease(ENCODER, LEARNER, size_pages=3)
    large = drive.allocate(ENCODER, LEARNER, size_pages=2)
    small = drive.allocate(ENCODER, LEARNER, size_pages=1)
    drive.cancel(ENCODER, large)
    assert drive.answer(small) is not None


def test_reservation_is_replaced_and_given_back(drive: Driver) -> None:
    drive.answer(reserve(drive, LEARNER, 3))
    drive.answer(reserve(drive, LEARNER, 4))
    with pytest.raises(ArenaFull, match="reservation workspace of learner/0"):
        drive.answer(reserve(drive, LEARNER, 1, name="workspace"))
    with pytest.raises(ArenaFull):
        drive.answer(reserve(drive, LEARNER, 5))
    assert drive.used_pages == 4
    drive.answer(reserve(drive, LEARNER, 0))
    assert drive.used_pages == 0
    assert drive.state.ledger().rows == ()


def test_reservation_of_an_unknown_run(drive: Driver) -> None:
    drive.do(events.RunClosed, run_id=RUN)
    with pytest.raises(UnknownRun):
        drive.answer(reserve(drive, LEARNER, 1))
