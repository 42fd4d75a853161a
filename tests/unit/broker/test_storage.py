"""Storages: creating and attaching, versions, exclusive holds, torn contents."""

from __future__ import annotations

import pytest

from common.tensors.errors import (
    ArenaFull,
    BrokerTimeout,
    NotDeclared,
    RequestCancelled,
    StaleLease,
    StaleVersion,
    StorageMismatch,
    StorageMisuse,
    StorageTorn,
    UnknownRun,
    UnknownStorage,
)
from common.tensors.storage import HoldKind, StorageSpec
from services.broker import events
from tests.unit.broker.driver import ENCODER, LEARNER, REFERENCE, ROLLOUT, RUN, Driver, pages

READ, WRITE, EXCLUSIVE = HoldKind.READ, HoldKind.WRITE, HoldKind.EXCLUSIVE


def spec(size_pages: int = 1) -> StorageSpec:
    return StorageSpec(
        tensors=pages(size_pages), readers=(ROLLOUT, REFERENCE), writers=(LEARNER, ENCODER)
    )


@pytest.fixture
def drive() -> Driver:
    driver = Driver()
    driver.begin(1)
    return driver


@pytest.fixture
def weights(drive: Driver):
    return drive.answer(drive.open(LEARNER, spec())).storage_id


def write(drive: Driver, weights, version: int) -> None:
    hold = drive.answer(drive.hold(LEARNER, weights, WRITE, version=version)).hold_id
    drive.publish(LEARNER, hold)


def test_attachers_wait_for_the_creator(drive: Driver) -> None:
    reader = drive.open(ROLLOUT)
    same = drive.open(ENCODER)
    assert drive.waits(reader)
    created = drive.answer(drive.open(LEARNER, spec()))
    assert created.created
    assert created.handle.writable
    assert created.version is None
    attached = drive.answer(reader)
    assert not attached.created
    assert not attached.handle.writable
    assert attached.handle.generation == created.handle.generation
    assert drive.answer(same).handle.writable
    assert drive.used_pages == 1


def test_a_second_creator_attaches_if_equal(drive: Driver, weights) -> None:
    again = drive.answer(drive.open(ENCODER, spec()))
    assert not again.created
    assert again.storage_id == weights
    with pytest.raises(
        StorageMismatch, match=r"made by learner/0, and has for bytes: .*4096.*8192"
    ):
        drive.answer(drive.open(ENCODER, spec(2)))


def test_undeclared_participants_stay_out(drive: Driver) -> None:
    narrow = StorageSpec(tensors=pages(1), readers=(), writers=(LEARNER,))
    with pytest.raises(NotDeclared):
        drive.answer(drive.open(ENCODER, narrow))
    waiting = drive.open(ROLLOUT)
    drive.answer(drive.open(LEARNER, narrow))
    with pytest.raises(NotDeclared, match="neither reader nor writer"):
        drive.answer(waiting)


def test_readers_do_not_write(drive: Driver, weights) -> None:
    for kind in (WRITE, EXCLUSIVE):
        with pytest.raises(NotDeclared, match=r"declared for learner/0, prefix-encoder/0"):
            drive.answer(drive.hold(ROLLOUT, weights, kind))


def test_attach_deadline_and_cancel(drive: Driver) -> None:
    late = drive.open(ROLLOUT, timeout_s=1)
    cancelled = drive.open(REFERENCE)
    drive.cancel(REFERENCE, cancelled)
    drive.pass_time(1)
    with pytest.raises(BrokerTimeout, match="storage weights of run run was not created"):
        drive.answer(late)
    with pytest.raises(RequestCancelled):
        drive.answer(cancelled)


def test_creation_waits_for_room_and_the_next_creator_takes_over(drive: Driver) -> None:
    drive.lease(ENCODER, LEARNER, size_pages=8)
    first = drive.open(LEARNER, spec(2))
    second = drive.open(ENCODER, spec(2))
    reader = drive.open(ROLLOUT)
    assert all(map(drive.waits, (first, second, reader)))
    drive.kill(LEARNER)
    drive.begin(2)
    drive.kill(ENCODER)  # its lease drained until now
    assert drive.used_pages == 0
    assert drive.waits(reader)
    drive.join(LEARNER)
    assert drive.answer(drive.open(LEARNER, spec(2))).created
    assert not drive.answer(reader).created


def test_cancelled_creation_is_taken_over(drive: Driver) -> None:
    lease = drive.lease(ROLLOUT, LEARNER, size_pages=8)
    first = drive.open(LEARNER, spec(2))
    second = drive.open(ENCODER, spec(2))
    drive.cancel(LEARNER, first)
    drive.abandon(ROLLOUT, lease)
    assert drive.answer(second).created


def test_storage_that_never_fits(drive: Driver) -> None:
    with pytest.raises(ArenaFull, match=r"storage weights of learner/0 .*waiting cannot help"):
        drive.answer(drive.open(LEARNER, spec(9)))


def test_read_waits_for_its_version(drive: Driver, weights) -> None:
    early = drive.hold(ROLLOUT, weights, READ, version=1)
    write(drive, weights, 0)
    assert drive.waits(early)
    write(drive, weights, 1)
    assert drive.answer(early).version == 1


def test_writer_waits_for_readers_and_blocks_none_of_the_old_version(
    drive: Driver, weights
) -> None:
    write(drive, weights, 0)
    first = drive.answer(drive.hold(ROLLOUT, weights, READ, version=0)).hold_id
    writer = drive.hold(LEARNER, weights, WRITE, version=1)
    second = drive.answer(drive.hold(REFERENCE, weights, READ, version=0)).hold_id
    early = drive.hold(ROLLOUT, weights, READ, version=1)
    drive.let_go(ROLLOUT, first)
    assert drive.waits(writer)
    drive.let_go(REFERENCE, second)
    hold = drive.answer(writer).hold_id
    late = drive.hold(REFERENCE, weights, READ, version=0)
    assert drive.waits(late)
    drive.publish(LEARNER, hold)
    assert drive.answer(early).version == 1
    with pytest.raises(StaleVersion, match="weights is at version 1; version 0"):
        drive.answer(late)


def test_own_read_hold_keeps_the_writer_waiting(drive: Driver, weights) -> None:
    write(drive, weights, 0)
    read = drive.answer(drive.hold(LEARNER, weights, READ, version=0)).hold_id
    writer = drive.hold(LEARNER, weights, WRITE, version=1)
    assert drive.waits(writer)
    drive.let_go(LEARNER, read)
    assert drive.answer(writer) is not None


def test_hold_deadline_names_the_holders(drive: Driver, weights) -> None:
    write(drive, weights, 0)
    drive.hold(ROLLOUT, weights, READ, version=0)
    writer = drive.hold(LEARNER, weights, WRITE, version=1, timeout_s=1)
    drive.pass_time(1)
    with pytest.raises(
        BrokerTimeout,
        match=r"a write hold of version 1 .*readable\(v0\), held by rollout/0 \(read\)",
    ):
        drive.answer(writer)


def test_an_older_version_may_be_written_after_a_restore(drive: Driver, weights) -> None:
    write(drive, weights, 5)
    write(drive, weights, 3)
    assert drive.answer(drive.hold(ROLLOUT, weights, READ, version=3)) is not None


def test_dead_writer_leaves_it_torn(drive: Driver, weights) -> None:
    write(drive, weights, 0)
    drive.hold(LEARNER, weights, WRITE, version=1)
    waiting = drive.hold(ROLLOUT, weights, READ, version=1)
    drive.kill(LEARNER)
    with pytest.raises(StorageTorn, match=r"learner/0 died while it wrote version 1"):
        drive.answer(waiting)
    with pytest.raises(StorageTorn):
        drive.answer(drive.hold(ROLLOUT, weights, READ, version=0))
    drive.join(LEARNER)
    attached = drive.answer(drive.open(LEARNER, spec()))
    assert attached.torn
    assert not attached.created
    hold = drive.answer(drive.hold(LEARNER, weights, WRITE, version=0)).hold_id
    reader = drive.hold(ROLLOUT, weights, READ, version=0)
    assert drive.waits(reader)
    drive.publish(LEARNER, hold)
    assert drive.answer(reader).version == 0


def test_write_given_up_is_torn_unless_untouched(drive: Driver, weights) -> None:
    write(drive, weights, 0)
    hold = drive.answer(drive.hold(LEARNER, weights, WRITE, version=1)).hold_id
    drive.let_go(LEARNER, hold, untouched=True)
    read = drive.answer(drive.hold(ROLLOUT, weights, READ, version=0)).hold_id
    drive.let_go(ROLLOUT, read)
    hold = drive.answer(drive.hold(LEARNER, weights, WRITE, version=1)).hold_id
    drive.let_go(LEARNER, hold)
    with pytest.raises(StorageTorn, match="gave up writing version 1"):
        drive.answer(drive.hold(ROLLOUT, weights, READ, version=0))


def test_dead_reader_lets_the_writer_in(drive: Driver, weights) -> None:
    write(drive, weights, 0)
    drive.hold(ROLLOUT, weights, READ, version=0)
    writer = drive.hold(LEARNER, weights, WRITE, version=1)
    drive.kill(ROLLOUT)
    assert drive.answer(writer) is not None


def test_only_a_write_hold_is_published(drive: Driver, weights) -> None:
    write(drive, weights, 0)
    hold = drive.answer(drive.hold(LEARNER, weights, READ, version=0)).hold_id
    with pytest.raises(StorageMisuse, match="under a read hold"):
        drive.publish(LEARNER, hold)
    with pytest.raises(UnknownStorage, match="has no hold"):
        drive.publish(ENCODER, hold)


def test_exclusive_holds_take_turns(drive: Driver, weights) -> None:
    first = drive.answer(drive.hold(LEARNER, weights, EXCLUSIVE)).hold_id
    second = drive.hold(ENCODER, weights, EXCLUSIVE)
    third = drive.hold(LEARNER, weights, EXCLUSIVE)
    drive.let_go(LEARNER, first)
    assert drive.waits(third)
    drive.let_go(ENCODER, drive.answer(second).hold_id)
    assert not drive.answer(third).dirty


def test_dead_exclusive_holder_leaves_it_dirty_for_the_epoch(drive: Driver, weights) -> None:
    drive.hold(ENCODER, weights, EXCLUSIVE)
    waiting = drive.hold(LEARNER, weights, EXCLUSIVE)
    drive.kill(ENCODER)
    with pytest.raises(StorageTorn, match="died in epoch 1 while it changed"):
        drive.answer(waiting)
    drive.begin(2)
    first = drive.answer(drive.hold(LEARNER, weights, EXCLUSIVE, epoch=2))
    assert first.dirty
    drive.let_go(LEARNER, first.hold_id)
    assert not drive.answer(drive.hold(LEARNER, weights, EXCLUSIVE, epoch=2)).dirty


def test_exclusive_holds_belong_to_an_epoch(drive: Driver, weights) -> None:
    held = drive.answer(drive.hold(ENCODER, weights, EXCLUSIVE)).hold_id
    waiting = drive.hold(LEARNER, weights, EXCLUSIVE)
    drive.begin(2)
    with pytest.raises(StaleLease, match="ended when epoch 2"):
        drive.answer(waiting)
    with pytest.raises(StaleLease):
        drive.answer(drive.hold(LEARNER, weights, EXCLUSIVE, epoch=1))
    new = drive.hold(LEARNER, weights, EXCLUSIVE, epoch=2)
    assert drive.waits(new), "the old holder may still be adding to it"
    drive.let_go(ENCODER, held)
    assert drive.answer(new) is not None


def test_storage_outlives_epochs_and_its_creator(drive: Driver, weights) -> None:
    write(drive, weights, 0)
    drive.kill(LEARNER)
    drive.begin(2)
    assert drive.answer(drive.hold(ROLLOUT, weights, READ, version=0)) is not None


def test_closing_the_run_frees_it(drive: Driver, weights) -> None:
    write(drive, weights, 0)
    held = drive.answer(drive.hold(ROLLOUT, weights, READ, version=0)).hold_id
    writer = drive.hold(LEARNER, weights, WRITE, version=1)
    drive.do(events.RunClosed, run_id=RUN)
    with pytest.raises(UnknownRun, match="was closed"):
        drive.answer(writer)
    assert drive.used_pages == 0
    assert not drive.memory
    drive.let_go(ROLLOUT, held)
    with pytest.raises(UnknownStorage):
        drive.answer(drive.hold(ROLLOUT, weights, READ, version=0))


def test_failed_memory_ends_the_storage(drive: Driver) -> None:
    opened = drive.answer(drive.open(LEARNER, spec()))
    drive.do(events.MemoryFailed, generation=opened.handle.generation, reason="ENOMEM")
    assert drive.used_pages == 0
    drive.memory.clear()
    assert drive.answer(drive.open(LEARNER, spec())).created
