"""Leases: who may do what when, and how they end."""

from __future__ import annotations

import pytest

from common.actor.machine import InvalidTransition
from common.errors import InvalidArgument
from common.ids import LeaseId
from common.tensors.errors import (
    BrokerTimeout,
    LeaseMisuse,
    NotDeclared,
    RequestCancelled,
    StaleLease,
    UnknownLease,
)
from services.broker import events
from services.broker.instructions import ReplyAcquired
from services.broker.lifecycle import LeaseState
from tests.unit.broker.driver import ENCODER, LEARNER, PAGE, REFERENCE, ROLLOUT, Driver


@pytest.fixture
def drive() -> Driver:
    driver = Driver()
    driver.begin(1)
    return driver


def test_last_release_frees(drive: Driver) -> None:
    lease = drive.sealed(ENCODER, LEARNER, REFERENCE)
    for consumer in (LEARNER, REFERENCE):
        reply = drive.answer(drive.acquire(consumer, lease))
        assert isinstance(reply, ReplyAcquired)
        assert not reply.handles[0].writable
    drive.release(LEARNER, lease)
    assert drive.state.lease_states() == {lease: LeaseState.SEALED}
    assert drive.memory
    drive.release(REFERENCE, lease)
    assert drive.used_pages == 0
    assert not drive.memory


def test_acquire_waits_for_every_seal(drive: Driver) -> None:
    first = drive.lease(ENCODER, LEARNER)
    second = drive.lease(ENCODER, LEARNER)
    request = drive.acquire(LEARNER, second, first)
    drive.seal(ENCODER, first)
    assert drive.waits(request)
    drive.seal(ENCODER, second)
    reply = drive.answer(request)
    generations = {r.lease_id: r.generation for r in drive.state.ledger().rows}
    assert [h.generation for h in reply.handles] == [generations[second], generations[first]]


def test_consumer_that_releases_before_another_acquires_does_not_free(drive: Driver) -> None:
    lease = drive.sealed(ENCODER, LEARNER, REFERENCE)
    drive.acquire(LEARNER, lease)
    drive.release(LEARNER, lease)
    (row,) = drive.state.ledger().rows
    assert row.waiting_for == (REFERENCE,)
    assert drive.answer(drive.acquire(REFERENCE, lease)) is not None


def test_only_declared_consumers(drive: Driver) -> None:
    lease = drive.sealed(ENCODER, LEARNER)
    with pytest.raises(NotDeclared, match=r"rollout/0 is not a declared consumer.*learner/0"):
        drive.answer(drive.acquire(ROLLOUT, lease))
    with pytest.raises(NotDeclared, match=r"prefix-encoder/0 is not a declared consumer"):
        drive.answer(drive.acquire(ENCODER, lease))


def test_each_acquires_once(drive: Driver) -> None:
    lease = drive.lease(ENCODER, LEARNER, REFERENCE)
    waiting = drive.acquire(LEARNER, lease)
    with pytest.raises(LeaseMisuse, match="second time"):
        drive.answer(drive.acquire(LEARNER, lease))
    drive.seal(ENCODER, lease)
    assert drive.answer(waiting) is not None
    with pytest.raises(LeaseMisuse, match="second time"):
        drive.answer(drive.acquire(LEARNER, lease))
    drive.release(LEARNER, lease)
    with pytest.raises(LeaseMisuse, match="second time"):
        drive.answer(drive.acquire(LEARNER, lease))


def test_lease_named_twice_in_one_acquire(drive: Driver) -> None:
    lease = drive.sealed(ENCODER, LEARNER)
    with pytest.raises(LeaseMisuse, match="named twice"):
        drive.answer(drive.acquire(LEARNER, lease, lease))


@pytest.mark.parametrize("consumers", [(), (LEARNER, LEARNER)])
def test_consumers_have_to_be_some_and_different(drive: Driver, consumers: tuple) -> None:
    with pytest.raises(InvalidArgument, match="at least one, and each only once"):
        drive.answer(drive.allocate(ENCODER, *consumers))


def test_release_of_what_is_not_held(drive: Driver) -> None:
    lease = drive.sealed(ENCODER, LEARNER, REFERENCE)
    with pytest.raises(LeaseMisuse, match="does not hold"):
        drive.release(LEARNER, lease)
    drive.acquire(LEARNER, lease)
    drive.release(LEARNER, lease)
    with pytest.raises(LeaseMisuse, match="does not hold"):
        drive.release(LEARNER, lease)


def test_seal_is_the_producers_and_happens_once(drive: Driver) -> None:
    lease = drive.lease(ENCODER, LEARNER)
    with pytest.raises(NotDeclared, match=r"prefix-encoder/0's, not learner/0's"):
        drive.seal(LEARNER, lease)
    drive.seal(ENCODER, lease)
    with pytest.raises(LeaseMisuse, match="sealed or abandoned before"):
        drive.seal(ENCODER, lease)


def test_seal_with_another_generation(drive: Driver) -> None:
    lease = drive.lease(ENCODER, LEARNER)
    with pytest.raises(StaleLease, match="generation"):
        drive.seal(ENCODER, lease, generation=999)
    assert drive.state.lease_states() == {lease: LeaseState.ALLOCATED}


def test_stale_use_says_when_and_why(drive: Driver) -> None:
    lease = drive.sealed(ENCODER, LEARNER)
    drive.acquire(LEARNER, lease)
    drive.release(LEARNER, lease)
    drive.pass_time(2.5)
    with pytest.raises(
        StaleLease,
        match=rf"lease {lease} \(kv of epoch 1\) ended 2\.500 s ago: its last consumer learner/0",
    ):
        drive.answer(drive.acquire(LEARNER, lease))


def test_unknown_lease(drive: Driver) -> None:
    with pytest.raises(UnknownLease, match="never given out"):
        drive.answer(drive.acquire(LEARNER, LeaseId(44)))


def test_acquire_deadline_names_the_producer(drive: Driver) -> None:
    lease = drive.lease(ENCODER, LEARNER)
    request = drive.acquire(LEARNER, lease, timeout_s=1)
    assert drive.state.next_deadline_ns() == drive.deadline(1)
    drive.pass_time(0.999)
    assert drive.waits(request)
    drive.pass_time(0.001)
    with pytest.raises(BrokerTimeout, match=r"lease \d+ \(kv\) of prefix-encoder/0"):
        drive.answer(request)
    assert drive.state.next_deadline_ns() is None
    drive.seal(ENCODER, lease)
    assert drive.answer(drive.acquire(LEARNER, lease)) is not None


def test_timeout_of_zero_answers_at_once(drive: Driver) -> None:
    lease = drive.lease(ENCODER, LEARNER)
    with pytest.raises(BrokerTimeout):
        drive.answer(drive.acquire(LEARNER, lease, timeout_s=0))


def test_cancelled_acquire_takes_nothing(drive: Driver) -> None:
    lease = drive.lease(ENCODER, LEARNER)
    request = drive.acquire(LEARNER, lease)
    drive.cancel(LEARNER, request)
    with pytest.raises(RequestCancelled):
        drive.answer(request)
    drive.seal(ENCODER, lease)
    assert drive.answer(drive.acquire(LEARNER, lease)) is not None
    drive.cancel(LEARNER, request)  # it was answered long ago


def test_abandoned_before_the_seal(drive: Driver) -> None:
    lease = drive.lease(ENCODER, LEARNER)
    request = drive.acquire(LEARNER, lease)
    drive.abandon(ENCODER, lease)
    with pytest.raises(StaleLease, match="abandoned it: group dropped"):
        drive.answer(request)
    assert drive.used_pages == 0
    drive.abandon(ENCODER, lease)  # it may have ended meanwhile


def test_abandoned_while_held_keeps_the_holders_bytes(drive: Driver) -> None:
    lease = drive.sealed(ENCODER, LEARNER, REFERENCE)
    drive.acquire(LEARNER, lease)
    drive.abandon(ENCODER, lease)
    assert drive.state.lease_states() == {lease: LeaseState.DRAINING}
    with pytest.raises(StaleLease, match="group dropped"):
        drive.answer(drive.acquire(REFERENCE, lease))
    assert drive.used_pages == 1
    drive.release(LEARNER, lease)
    assert drive.used_pages == 0


def test_dead_producers_unsealed_lease_is_freed_and_waiters_are_told(drive: Driver) -> None:
    unsealed = drive.lease(ENCODER, LEARNER)
    sealed = drive.sealed(ENCODER, LEARNER)
    request = drive.acquire(LEARNER, unsealed)
    drive.kill(ENCODER)
    with pytest.raises(StaleLease, match=r"producer prefix-encoder/0 died before sealing"):
        drive.answer(request)
    assert drive.state.lease_states() == {sealed: LeaseState.SEALED}
    assert drive.answer(drive.acquire(LEARNER, sealed)) is not None


def test_dead_consumers_hold_counts_as_released(drive: Driver) -> None:
    lease = drive.sealed(ENCODER, LEARNER)
    other = drive.lease(ENCODER, LEARNER)
    drive.acquire(LEARNER, lease)
    waiting = drive.acquire(LEARNER, other)
    drive.kill(LEARNER)
    assert drive.state.lease_states() == {other: LeaseState.ALLOCATED}
    drive.seal(ENCODER, other)
    assert drive.waits(waiting)


def test_failed_memory_ends_the_lease(drive: Driver) -> None:
    request = drive.allocate(ENCODER, LEARNER)
    lease = drive.answer(request).lease_id
    generation = drive.answer(request).handle.generation
    drive.do(events.MemoryFailed, generation=generation, reason="ENOMEM")
    assert drive.used_pages == 0
    with pytest.raises(StaleLease, match="the system gave no memory: ENOMEM"):
        drive.answer(drive.acquire(LEARNER, lease))


def test_generations_are_never_used_twice(drive: Driver) -> None:
    seen = set()
    for _ in range(3):
        request = drive.allocate(ENCODER, LEARNER)
        seen.add(drive.answer(request).handle.generation)
        drive.abandon(ENCODER, drive.answer(request).lease_id)
    assert len(seen) == 3


def test_pages_are_counted_whole(drive: Driver) -> None:
    drive.lease(ENCODER, LEARNER, size_pages=0)
    drive.lease(ENCODER, LEARNER, size_pages=2)
    assert drive.state.ledger().used_bytes == 3 * PAGE


def test_illegal_move_tells_the_story(drive: Driver) -> None:
    lease = drive.sealed(ENCODER, LEARNER)
    record = drive.state._leases._live(lease, at_ns=0)
    with pytest.raises(InvalidTransition, match=r"SEALED -> ALLOCATED.*allocated by.*sealed it"):
        record.move(LeaseState.ALLOCATED, "a test", at_ns=0)
