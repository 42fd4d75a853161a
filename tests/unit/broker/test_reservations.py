"""Reservations of memory that is away between two steps."""

from __future__ import annotations

import pytest

from common.tensors.errors import ArenaFull, BrokerTimeout, RequestCancelled
from common.tensors.spec import Placement
from services.broker import events
from services.broker.instructions import AnnounceStepBegan
from tests.unit.broker.driver import ENCODER, LEARNER, PAGE, ROLLOUT, RUN, Driver

NAME = "rollout.kv"


@pytest.fixture
def drive() -> Driver:
    """The rollout has 2 of 4 pages away, and keeps one."""
    driver = Driver(capacity_pages=4)
    shrink(driver)
    driver.begin(1)
    return driver


def shrink(drive: Driver) -> None:
    drive.tell(ROLLOUT, events.ReserveMemory, **reservation(1), away_bytes=2 * PAGE)


def take(drive: Driver, *, timeout_s: float = 10.0) -> int:
    deadline_ns = drive.deadline(timeout_s)
    return drive.ask(ROLLOUT, events.ReserveMemory, **reservation(3), deadline_ns=deadline_ns)


def reservation(size_pages: int) -> dict:
    return {
        "run_id": RUN,
        "name": NAME,
        "placement": Placement.DEVICE,
        "size_bytes": size_pages * PAGE,
    }


def used_pages(drive: Driver) -> int:
    return drive.state.ledger().arena("cpu").used_bytes // PAGE


def test_leases_of_a_step_leave_room_for_what_is_away() -> None:
    drive = Driver(capacity_pages=4)

    def room(epoch: int) -> int:
        (began,) = [s for s in drive.begin(epoch) if isinstance(s, AnnounceStepBegan)]
        return began.lease_room_bytes["cpu"] // PAGE

    assert room(1) == 4
    shrink(drive)
    assert used_pages(drive) == 1
    assert room(2) == 1
    drive.answer(take(drive))
    assert used_pages(drive) == 3
    assert room(3) == 1
    drive.tell(ROLLOUT, events.ReserveMemory, **reservation(0))
    assert room(4) == 4


def test_it_waits_for_room(drive: Driver) -> None:
    leases = [drive.lease(ENCODER, LEARNER) for _ in range(2)]
    request = take(drive)
    assert drive.waits(request)
    drive.abandon(ENCODER, leases.pop())
    drive.answer(request)
    assert used_pages(drive) == 4
    shrink(drive)
    assert used_pages(drive) == 2


def test_it_is_refused_where_waiting_cannot_help(drive: Driver) -> None:
    drive.answer(
        drive.ask(LEARNER, events.ReserveMemory, **{**reservation(2), "name": "activations"})
    )
    with pytest.raises(
        ArenaFull, match=r"(?s)reservation rollout\.kv.*waiting cannot help.*learner/0"
    ):
        drive.answer(take(drive))
    assert used_pages(drive) == 3


def test_it_is_refused_in_time(drive: Driver) -> None:
    drive.lease(ENCODER, LEARNER, size_pages=2)
    request = take(drive, timeout_s=1.0)
    drive.pass_time(1.0)
    with pytest.raises(BrokerTimeout, match=r"reservation rollout\.kv"):
        drive.answer(request)
    assert used_pages(drive) == 3


def test_one_that_is_taken_back_takes_nothing(drive: Driver) -> None:
    lease = drive.lease(ENCODER, LEARNER, size_pages=2)
    request = take(drive)
    drive.cancel(ROLLOUT, request)
    shrink(drive)
    drive.abandon(ENCODER, lease)
    assert used_pages(drive) == 1


def test_one_that_waits_is_replaced(drive: Driver) -> None:
    lease = drive.lease(ENCODER, LEARNER, size_pages=2)
    request = take(drive)
    shrink(drive)
    with pytest.raises(RequestCancelled, match="asked for anew"):
        drive.answer(request)
    drive.abandon(ENCODER, lease)
    assert used_pages(drive) == 1


def test_nothing_comes_of_less_for_a_run_that_is_closed(drive: Driver) -> None:
    drive.do(events.RunClosed, run_id=RUN)
    shrink(drive)
    assert used_pages(drive) == 0
