"""What is left of a budget to the processes' own allocators."""

from __future__ import annotations

from dataclasses import replace

from common.tensors.spec import Held
from common.tensors.storage import HoldKind
from services.broker import events
from tests.unit.broker.driver import ENCODER, GPU_PAGE, LEARNER, PAGE, Driver, pages
from tests.unit.broker.test_spilling import SPEC


def test_what_somebody_waits_for_is_not_left_to_allocators() -> None:
    drive = Driver(gpu_pages=3, copies_pages=2 * GPU_PAGE // PAGE)
    drive.begin(1)
    spec = replace(SPEC, tensors=pages(2 * GPU_PAGE // PAGE))
    storage = drive.answer(drive.open(LEARNER, spec)).storage_id
    drive.publish(LEARNER, drive.answer(drive.hold(LEARNER, storage, HoldKind.WRITE)).hold_id)
    drive.park(LEARNER, storage)
    drive.end_move()

    def left() -> int:
        asked = drive.ask(ENCODER, events.ReportHeld, name=Held.ALLOCATOR, size_bytes=0)
        return int(drive.answer(asked).free_bytes)

    leases = [drive.lease(ENCODER, LEARNER) for _ in range(2)]
    assert left() == GPU_PAGE
    hold = drive.hold(LEARNER, storage, HoldKind.READ)
    assert drive.waits(hold)
    assert left() == 0
    drive.abandon(ENCODER, leases.pop())
    drive.end_move()
    assert not drive.waits(hold)
    assert left() == 0
    drive.abandon(ENCODER, leases.pop())
    assert left() == GPU_PAGE
