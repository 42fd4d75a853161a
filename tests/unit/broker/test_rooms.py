"""Two memories of one node: where allocations go, and budgets that do not mix."""

from __future__ import annotations

import pytest

from common.errors import InvalidArgument
from common.tensors.errors import ArenaFull, StorageMismatch
from common.tensors.spec import Placement
from common.tensors.storage import StorageSpec
from services.broker import events, instructions
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

OTHER_GPU = "GPU-99999999-1111-2222-3333-444444444444"


@pytest.fixture
def drive() -> Driver:
    driver = Driver(capacity_pages=4, gpu_pages=2)
    driver.begin(1)
    return driver


def created(drive: Driver) -> list[tuple[str, int, bool]]:
    return [
        (order.device, order.size_bytes, order.zeroed)
        for order in drive.said
        if isinstance(order, instructions.CreateMemory)
    ]


def test_each_goes_where_it_is_placed_and_takes_that_arenas_pages(drive: Driver) -> None:
    drive.lease(ENCODER, LEARNER, placement=Placement.HOST)
    drive.lease(ENCODER, LEARNER, placement=Placement.DEVICE)
    assert created(drive) == [("cpu", PAGE, False), (GPU, GPU_PAGE, False)]
    host, gpu = drive.state.ledger().arenas
    assert (host.device, host.used_bytes) == ("cpu", PAGE)
    assert (gpu.device, gpu.used_bytes) == (GPU, GPU_PAGE)
    assert drive.state.ledger().used_bytes == PAGE + GPU_PAGE


def test_the_handle_says_where(drive: Driver) -> None:
    lease = drive.sealed(ENCODER, LEARNER, placement=Placement.DEVICE)
    (handle,) = drive.answer(drive.acquire(LEARNER, lease)).handles
    assert (handle.device, handle.size_bytes) == (GPU, GPU_PAGE)


def test_without_a_gpu_both_are_the_hosts() -> None:
    drive = Driver(capacity_pages=4)
    drive.begin(1)
    drive.lease(ENCODER, LEARNER, placement=Placement.HOST)
    drive.lease(ENCODER, LEARNER, placement=Placement.DEVICE)
    assert {device for device, _, _ in created(drive)} == {"cpu"}
    assert drive.used_pages == 2


def test_one_full_arena_keeps_nothing_back_from_the_other(drive: Driver) -> None:
    drive.lease(ENCODER, LEARNER, placement=Placement.DEVICE)
    last = drive.lease(ENCODER, LEARNER, placement=Placement.DEVICE)
    waiting = drive.allocate(ENCODER, LEARNER, placement=Placement.DEVICE)
    assert drive.waits(waiting)
    assert not drive.waits(drive.allocate(ENCODER, LEARNER, placement=Placement.HOST))
    drive.abandon(ENCODER, last)
    assert drive.answer(waiting) is not None


def test_refusal_names_the_device_and_shows_both_arenas(drive: Driver) -> None:
    drive.lease(ENCODER, LEARNER, placement=Placement.HOST)
    size_pages = 3 * GPU_PAGE // PAGE
    with pytest.raises(ArenaFull) as caught:
        drive.answer(drive.allocate(ENCODER, LEARNER, size_pages=size_pages))
    assert f"waiting cannot help; of {GPU}, {2 * GPU_PAGE} bytes are free" in str(caught.value)
    lines = caught.value.ledger.splitlines()
    assert lines[0].startswith(f"arena cpu: {4 * PAGE} bytes, {PAGE} used")
    assert lines[1].startswith(f"arena {GPU}: {2 * GPU_PAGE} bytes, 0 used")
    assert lines[2].endswith("device")
    assert lines[3].endswith("cpu")


def test_storage_lies_where_its_creator_says_and_is_zeroed(drive: Driver) -> None:
    spec = StorageSpec(
        tensors=pages(1), readers=(ROLLOUT,), writers=(LEARNER,), placement=Placement.HOST
    )
    drive.answer(drive.open(LEARNER, spec))
    assert created(drive) == [("cpu", PAGE, True)]
    on_device = StorageSpec(tensors=pages(1), readers=(ROLLOUT,), writers=(LEARNER,))
    with pytest.raises(StorageMismatch, match="its placement are host, not device"):
        drive.answer(drive.open(ROLLOUT, on_device))


def test_reservations_count_in_the_arena_they_are_for(drive: Driver) -> None:
    def reserve(placement: Placement, size_bytes: int) -> None:
        request = drive.ask(
            LEARNER,
            events.ReserveMemory,
            run_id=RUN,
            name="activations",
            placement=placement,
            size_bytes=size_bytes,
        )
        drive.answer(request)

    reserve(Placement.DEVICE, GPU_PAGE)
    reserve(Placement.HOST, PAGE)
    assert [arena.used_bytes for arena in drive.state.ledger().arenas] == [PAGE, GPU_PAGE]
    with pytest.raises(ArenaFull, match=f"2097153 bytes, 2097152 of {GPU} are free"):
        drive.answer(
            drive.ask(
                ROLLOUT,
                events.ReserveMemory,
                run_id=RUN,
                name="workspace",
                placement=Placement.DEVICE,
                size_bytes=GPU_PAGE + 1,
            )
        )
    reserve(Placement.HOST, 0)
    assert [arena.used_bytes for arena in drive.state.ledger().arenas] == [0, GPU_PAGE]


def test_a_gpu_that_the_broker_does_not_have(drive: Driver) -> None:
    drive.kill(ENCODER)
    drive.join(ENCODER, OTHER_GPU)
    drive.lease(ENCODER, LEARNER, placement=Placement.HOST)
    with pytest.raises(InvalidArgument, match=f"computes on {OTHER_GPU}, .* it has cpu, {GPU}"):
        drive.answer(drive.allocate(ENCODER, LEARNER, placement=Placement.DEVICE))
    drive.kill(ENCODER)
    drive.join(ENCODER, GPU)
    drive.lease(ENCODER, LEARNER, placement=Placement.DEVICE)


def test_the_ledgers_wire_form_has_every_arena(drive: Driver) -> None:
    drive.lease(ENCODER, LEARNER, placement=Placement.HOST)
    message = ledger_to_proto(drive.state.ledger(), device=drive.state.default_device)
    assert (message.device, message.capacity_bytes, message.used_bytes) == (GPU, 2 * GPU_PAGE, 0)
    assert [(arena.device, arena.used_bytes) for arena in message.arenas] == [
        ("cpu", PAGE),
        (GPU, 0),
    ]
    assert [entry.device for entry in message.entries] == ["cpu"]
