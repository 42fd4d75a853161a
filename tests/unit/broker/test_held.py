"""What processes hold of a device themselves: counted, never refused, and kept room for."""

from __future__ import annotations

import pytest

from common.ids import RunId
from common.tensors.errors import ArenaFull, BrokerTimeout
from common.tensors.spec import Held, Placement, Residency
from common.tensors.storage import StorageSpec
from services.broker import events
from services.broker.instructions import AnnounceMemoryWanted
from services.broker.ledger import TABLE_ROWS
from services.broker.rooms import ArenaSize
from services.broker.spilling import AGAIN_NS
from services.broker.state import BrokerState
from services.broker.translate import ledger_to_proto
from tests.unit.broker.driver import (
    ENCODER,
    GPU,
    GPU_PAGE,
    LEARNER,
    PAGE,
    ROLLOUT,
    RUN,
    Driver,
    pages,
)

CAPACITY = 4
LIMIT = 5
ONE_GPU_PAGE = GPU_PAGE // PAGE


@pytest.fixture
def drive() -> Driver:
    driver = Driver(gpu_pages=CAPACITY, limit_pages=LIMIT)
    driver.begin(1)
    return driver


def lease_pages(count: int) -> dict[str, int]:
    return {"size_pages": count * ONE_GPU_PAGE}


def wanted(drive: Driver) -> list[tuple[str, int]]:
    return [
        (said.device, said.size_bytes)
        for said in drive.said
        if isinstance(said, AnnounceMemoryWanted)
    ]


def test_rows_by_participant_and_class(drive: Driver) -> None:
    drive.lease(ENCODER, LEARNER, name="policy.prefix_kv")
    drive.hold_own(ENCODER, 2)
    drive.hold_own(ENCODER, 1, Held.CONTEXT)
    drive.hold_own(LEARNER, 1)
    drive.hold_own(LEARNER, 3)
    ledger = drive.state.ledger()
    found = {
        (row.producer, row.name, row.size_bytes // GPU_PAGE) for row in ledger.rows if row.held
    }
    assert found == {
        (ENCODER, "allocator", 2),
        (ENCODER, "context", 1),
        (LEARNER, "allocator", 3),
    }
    gpu = ledger.arena(GPU)
    assert (gpu.used_bytes, gpu.held_bytes) == (GPU_PAGE, 6 * GPU_PAGE)
    assert (gpu.peak_bytes, gpu.peak_total_bytes) == (GPU_PAGE, 7 * GPU_PAGE)
    assert gpu.free_bytes == 0
    assert f"{6 * GPU_PAGE} held by processes" in ledger.table()
    assert "prefix-encoder/0 returns it to the device" in ledger.table()
    wire = ledger_to_proto(ledger, device=GPU)
    (arena,) = [arena for arena in wire.arenas if arena.device == GPU]
    assert sum(entry.bytes for entry in wire.entries) == arena.used_bytes + arena.held_bytes
    assert {entry.run_id for entry in wire.entries} == {"", RUN}


def test_they_belong_to_no_run_and_go_with_their_process(drive: Driver) -> None:
    drive.hold_own(LEARNER, 2)
    drive.hold_own(LEARNER, 1, Held.CONTEXT)
    drive.hold_own(ROLLOUT, 1)
    assert drive.state.ledger(RUN).rows == ()
    assert drive.state.ledger(RunId("other")).arena(GPU).held_bytes == 4 * GPU_PAGE
    drive.do(events.RunClosed, run_id=RUN)
    assert drive.state.ledger().arena(GPU).held_bytes == 4 * GPU_PAGE
    drive.kill(LEARNER)
    assert drive.state.ledger().arena(GPU).held_bytes == GPU_PAGE
    drive.hold_own(ROLLOUT, 0)
    assert drive.state.ledger().rows == ()


def test_more_than_there_is_is_not_refused(drive: Driver) -> None:
    drive.lease(ENCODER, LEARNER, **lease_pages(4))
    drive.hold_own(LEARNER, 100)
    assert drive.state.ledger().arena(GPU).held_bytes == 100 * GPU_PAGE


def test_a_request_waits_while_the_device_is_held_and_memory_is_called_for(drive: Driver) -> None:
    drive.hold_own(LEARNER, LIMIT - 1)
    request = drive.allocate(ENCODER, LEARNER, **lease_pages(2))
    assert drive.waits(request)
    assert wanted(drive) == [(GPU, 2 * GPU_PAGE)]
    drive.pass_time(AGAIN_NS / 1e9 / 2)
    assert len(wanted(drive)) == 1
    drive.pass_time(AGAIN_NS / 1e9 / 2)
    assert len(wanted(drive)) == 2
    drive.hold_own(LEARNER, LIMIT - 2)
    assert drive.answer(request) is not None
    drive.pass_time(AGAIN_NS / 1e9)
    assert len(wanted(drive)) == 2


def test_what_waits_for_the_budget_calls_for_nothing(drive: Driver) -> None:
    drive.lease(ENCODER, LEARNER, **lease_pages(CAPACITY))
    drive.hold_own(LEARNER, 1)
    assert drive.waits(drive.allocate(ENCODER, LEARNER))
    drive.pass_time(AGAIN_NS / 1e9)
    assert wanted(drive) == []


def test_held_memory_leaves_the_budget_alone_below_the_limit(drive: Driver) -> None:
    drive.hold_own(LEARNER, LIMIT - CAPACITY)
    assert drive.lease(ENCODER, LEARNER, **lease_pages(CAPACITY))


def test_a_deadline_says_who_holds_the_device(drive: Driver) -> None:
    drive.hold_own(LEARNER, LIMIT)
    request = drive.allocate(ENCODER, LEARNER, timeout_s=1)
    drive.pass_time(1)
    with pytest.raises(BrokerTimeout, match="no room in time") as caught:
        drive.answer(request)
    assert f"{LIMIT * GPU_PAGE} held by processes, 0 free" in str(caught.value)
    assert "learner/0 returns it to the device" in str(caught.value)
    with pytest.raises(ArenaFull, match="waiting was not wanted") as full:
        drive.answer(drive.allocate(ENCODER, LEARNER, wait=False))
    assert "learner/0 returns it to the device" in full.value.ledger


def test_who_waits_for_a_creator_without_room_is_told_the_ledger(drive: Driver) -> None:
    drive.lease(ENCODER, LEARNER, **lease_pages(CAPACITY), name="policy.prefix_kv")
    spec = StorageSpec(
        tensors=pages(1), readers=(ENCODER,), writers=(LEARNER,), residency=Residency.PINNED
    )
    drive.open(LEARNER, spec)
    attacher = drive.open(ENCODER, timeout_s=1)
    drive.pass_time(1)
    with pytest.raises(BrokerTimeout, match="learner/0 waits for room for it") as caught:
        drive.answer(attacher)
    assert "policy.prefix_kv" in str(caught.value)


def test_a_reservation_shrinks_while_the_device_is_overfull(drive: Driver) -> None:
    def reserve(count: int) -> int:
        return drive.ask(
            LEARNER,
            events.ReserveMemory,
            run_id=RUN,
            name="workspace",
            size_bytes=count * GPU_PAGE,
            placement=Placement.DEVICE,
        )

    drive.answer(reserve(3))
    drive.hold_own(LEARNER, LIMIT)
    with pytest.raises(ArenaFull, match="reservation workspace of learner/0"):
        drive.answer(reserve(4))
    drive.answer(reserve(2))
    assert drive.state.ledger().arena(GPU).used_bytes == 2 * GPU_PAGE


def test_a_gpu_that_the_broker_has_no_memory_of_is_not_counted(drive: Driver) -> None:
    drive.kill(ROLLOUT)
    drive.join(ROLLOUT, "GPU-elsewhere")
    drive.hold_own(ROLLOUT, 3)
    assert drive.state.ledger().rows == ()


def test_the_brokers_own_context_is_in_the_ledger() -> None:
    host = ArenaSize(device="cpu", capacity_bytes=PAGE, page_bytes=PAGE)
    gpu = ArenaSize(
        device=GPU, capacity_bytes=GPU_PAGE, page_bytes=GPU_PAGE, context_bytes=GPU_PAGE // 2
    )
    state = BrokerState([host, gpu])
    state.validate()
    (row,) = state.ledger().rows
    assert (str(row.producer), row.name, row.size_bytes) == ("broker/0", "context", GPU_PAGE // 2)


def test_a_table_has_a_limit() -> None:
    drive = Driver(capacity_pages=TABLE_ROWS + 3)
    drive.begin(1)
    for _ in range(TABLE_ROWS + 3):
        drive.lease(ENCODER, LEARNER)
    table = drive.state.ledger().table()
    assert table.count("lease ") == TABLE_ROWS
    assert table.endswith(f"and 3 smaller ones, {3 * PAGE} bytes together")
