"""Epoch fences: what a new or aborted epoch ends, and what it leaves."""

from __future__ import annotations

import pytest

from common.errors import Stale
from common.ids import Epoch, RunId, StepIndex
from common.tensors.errors import StaleLease, UnknownRun
from services.broker import events
from services.broker.instructions import AnnounceStepAborted, AnnounceStepBegan
from services.broker.lifecycle import LeaseState
from tests.unit.broker.driver import ENCODER, LEARNER, REFERENCE, RUN, Driver, plan


@pytest.fixture
def drive() -> Driver:
    driver = Driver(capacity_pages=2)
    driver.begin(1)
    return driver


def test_new_epoch_frees_what_nobody_has_mapped(drive: Driver) -> None:
    lease = drive.sealed(ENCODER, LEARNER)
    drive.begin(2)
    assert drive.used_pages == 0
    with pytest.raises(StaleLease, match=r"ended .* ago: epoch 1 of run run ended when epoch 2"):
        drive.answer(drive.acquire(LEARNER, lease, epoch=1))


def test_what_is_mapped_drains(drive: Driver) -> None:
    held = drive.sealed(ENCODER, LEARNER, REFERENCE)
    drive.acquire(LEARNER, held)
    filling = drive.lease(ENCODER, LEARNER)
    drive.abort(1, "a death")
    assert set(drive.state.lease_states().values()) == {LeaseState.DRAINING}
    with pytest.raises(StaleLease, match="aborted: a death"):
        drive.answer(drive.acquire(REFERENCE, held))
    drive.begin(2)
    waiting = drive.allocate(ENCODER, LEARNER, epoch=2)
    assert drive.waits(waiting)
    (row,) = [r for r in drive.state.ledger().rows if r.lease_id == held]
    assert "learner/0 let go" in row.until
    drive.release(LEARNER, held)
    assert drive.answer(waiting) is not None
    drive.seal(ENCODER, filling)
    assert drive.used_pages == 1


def test_draining_ends_with_the_holder(drive: Driver) -> None:
    lease = drive.sealed(ENCODER, LEARNER)
    drive.acquire(LEARNER, lease)
    drive.lease(ENCODER, LEARNER)
    drive.abort(1)
    drive.kill(LEARNER)
    assert drive.used_pages == 1
    drive.kill(ENCODER)
    assert drive.used_pages == 0


def test_waiting_requests_of_an_ended_epoch_are_refused(drive: Driver) -> None:
    lease = drive.lease(ENCODER, LEARNER, size_pages=2)
    acquire = drive.acquire(LEARNER, lease)
    allocate = drive.allocate(LEARNER, ENCODER)
    assert drive.waits(allocate)
    drive.begin(2)
    for request in (acquire, allocate):
        with pytest.raises(StaleLease, match="epoch 1 of run run ended"):
            drive.answer(request)


@pytest.mark.parametrize(
    ("epoch", "text"), [(0, "ended when epoch 1"), (2, "has not begun here; the newest is 1")]
)
def test_only_the_current_epoch_allocates(drive: Driver, epoch: int, text: str) -> None:
    with pytest.raises(StaleLease, match=text):
        drive.answer(drive.allocate(ENCODER, LEARNER, epoch=epoch))


def test_nothing_is_allocated_before_the_first_step() -> None:
    drive = Driver()
    with pytest.raises(StaleLease, match="has not begun"):
        drive.answer(drive.allocate(ENCODER, LEARNER, epoch=0))


def test_acquire_under_another_epoch(drive: Driver) -> None:
    lease = drive.sealed(ENCODER, LEARNER)
    with pytest.raises(
        StaleLease, match="belongs to epoch 1, and was to be acquired under epoch 2"
    ):
        drive.answer(drive.acquire(LEARNER, lease, epoch=2))


def test_repeated_begin_changes_nothing(drive: Driver) -> None:
    lease = drive.lease(ENCODER, LEARNER)
    assert drive.do(events.StepRequested, plan=plan(1)) == []
    assert drive.state.lease_states() == {lease: LeaseState.ALLOCATED}
    assert sum(isinstance(said, AnnounceStepBegan) for said in drive.said) == 1


def test_begin_of_an_old_or_aborted_epoch(drive: Driver) -> None:
    with pytest.raises(Stale, match="ended when epoch 1"):
        drive.begin(0)
    drive.abort(1)
    with pytest.raises(Stale, match="was aborted"):
        drive.begin(1)


def test_another_step_needs_another_epoch(drive: Driver) -> None:
    with pytest.raises(Stale, match="needs an epoch of its own"):
        drive.do(events.StepRequested, plan=plan(1, step=5))


def test_abort_is_idempotent_and_fences_a_begin_that_comes_late(drive: Driver) -> None:
    drive.abort(2)
    drive.abort(2)
    assert (
        drive.said.count(
            AnnounceStepAborted(run_id=RUN, step=StepIndex(0), epoch=Epoch(2), reason="a test")
        )
        == 1
    )
    with pytest.raises(Stale, match="was aborted"):
        drive.begin(2)
    drive.abort(1)  # over since epoch 2 was opened
    drive.begin(3)
    assert not drive.state.is_over(RUN, Epoch(3))
    assert drive.state.is_over(RUN, Epoch(2))
    assert drive.state.is_over(RunId("another"), Epoch(3))


def test_opening_a_run_again_raises_its_fence(drive: Driver) -> None:
    lease = drive.sealed(ENCODER, LEARNER)
    drive.do(events.RunOpened, run_id=RUN, epoch=Epoch(1))
    assert drive.state.lease_states() == {lease: LeaseState.SEALED}
    drive.do(events.RunOpened, run_id=RUN, epoch=Epoch(5))
    assert drive.used_pages == 0
    with pytest.raises(Stale):
        drive.begin(4)
    drive.begin(5)


def test_runs_do_not_touch_each_other(drive: Driver) -> None:
    other = RunId("other")
    drive.do(events.RunOpened, run_id=other, epoch=Epoch(7))
    lease = drive.sealed(ENCODER, LEARNER)
    drive.begin(8, run_id=other)
    drive.do(events.RunClosed, run_id=other)
    assert drive.state.lease_states() == {lease: LeaseState.SEALED}


def test_closed_run_is_unknown(drive: Driver) -> None:
    drive.sealed(ENCODER, LEARNER)
    drive.do(events.RunClosed, run_id=RUN)
    drive.do(events.RunClosed, run_id=RUN)
    assert drive.used_pages == 0
    with pytest.raises(UnknownRun, match="open runs: none"):
        drive.answer(drive.allocate(ENCODER, LEARNER))
    with pytest.raises(UnknownRun):
        drive.begin(2)
