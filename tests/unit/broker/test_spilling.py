"""Storages whose contents leave the device and come back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from common.ids import Epoch
from common.tensors.errors import (
    ArenaFull,
    BrokerTimeout,
    NotDeclared,
    StaleVersion,
    StorageMisuse,
    StorageTorn,
    UnknownRun,
)
from common.tensors.spec import Residency
from common.tensors.storage import HoldKind, StorageSpec
from services.broker import events
from services.broker.instructions import (
    AnnounceMemoryWanted,
    AnnounceMoved,
    RestoreMemory,
    SpillMemory,
)
from services.broker.rooms import COPIES
from services.broker.spilling import AGAIN_NS
from tests.unit.broker.driver import (
    ENCODER,
    GPU,
    GPU_PAGE,
    LEARNER,
    PAGE,
    REFERENCE,
    ROLLOUT,
    RUN,
    Driver,
    pages,
)

if TYPE_CHECKING:
    from services.broker.events import StorageId

SPEC = StorageSpec(
    tensors=pages(1), readers=(ENCODER,), writers=(LEARNER,), residency=Residency.SPILLABLE
)
AGAIN_S = AGAIN_NS / 1e9


class Lone:
    """A GPU with room for two storages, and one that the learner has written and parked."""

    def __init__(self, *, parked: bool = True, **room: int) -> None:
        wanted = {"gpu_pages": 2, "copies_pages": GPU_PAGE // PAGE, **room}
        self.drive = Driver(**wanted)
        self.drive.begin(1)
        self.storage: StorageId = self.drive.answer(self.drive.open(LEARNER, SPEC)).storage_id
        self.write(0)
        if parked:
            self.park()

    def write(self, version: int) -> None:
        hold = self.drive.answer(self.hold(version)).hold_id
        self.drive.publish(LEARNER, hold)

    def hold(self, version: int, *, timeout_s: float = 100.0) -> int:
        return self.drive.hold(
            LEARNER, self.storage, HoldKind.WRITE, version=version, timeout_s=timeout_s
        )

    def park(self) -> None:
        self.drive.park(LEARNER, self.storage)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Where it has memory, and its state."""
        rows = self.drive.state.ledger().rows
        return [(row.device, row.state) for row in rows if row.name == "weights"]

    @property
    def wanted(self) -> list[Any]:
        return [said for said in self.drive.said if isinstance(said, AnnounceMemoryWanted)]


def spilled() -> Lone:
    lone = Lone()
    lone.drive.end_move()
    assert lone.rows == [(COPIES, "spilled readable(v0)")]
    return lone


def used(lone: Lone) -> dict[str, int]:
    return {arena.device: arena.used_bytes for arena in lone.drive.state.ledger().arenas}


def test_there_and_back() -> None:
    lone = Lone(parked=False)
    assert lone.rows == [(GPU, "readable(v0)")]
    assert COPIES not in used(lone)
    lone.park()
    assert isinstance(lone.drive.moves[0], SpillMemory)
    assert lone.rows == [(GPU, "spilling readable(v0)"), (COPIES, "spilling readable(v0)")]
    lone.drive.end_move()
    assert used(lone) == {"cpu": 0, GPU: 0, COPIES: GPU_PAGE}
    hold = lone.hold(1)
    assert lone.drive.waits(hold)
    assert isinstance(lone.drive.moves[0], RestoreMemory)
    assert lone.rows[0] == (GPU, "restoring readable(v0)")
    lone.drive.end_move()
    held = lone.drive.answer(hold)
    assert (held.handle.life, held.handle.device) == (1, GPU)
    # The host's memory is kept for the next time.
    assert used(lone) == {"cpu": 0, GPU: GPU_PAGE, COPIES: GPU_PAGE}
    lone.drive.publish(LEARNER, held.hold_id)
    lone.park()
    lone.drive.end_move()
    assert lone.rows == [(COPIES, "spilled readable(v1)")]


def test_what_was_only_read_since_is_not_copied_again() -> None:
    lone = Lone()
    copied = [lone.drive.moves[0].copied]
    for kind in (HoldKind.READ, HoldKind.READ, HoldKind.WRITE, HoldKind.EXCLUSIVE):
        lone.drive.end_move()
        asked = lone.drive.hold(LEARNER, lone.storage, kind)
        lone.drive.end_move()
        lone.drive.let_go(LEARNER, lone.drive.answer(asked).hold_id, untouched=True)
        lone.park()
        copied.append(lone.drive.moves[0].copied)
    # Who was let in to write is taken to have written.
    assert copied == [False, True, True, False, False]


def test_moves_are_told_with_their_size_and_time() -> None:
    lone = Lone()
    lone.drive.end_move()
    lone.hold(1)
    lone.drive.end_move(fail=True)
    lone.drive.pass_time(AGAIN_S)
    lone.drive.end_move()
    told = [said for said in lone.drive.said if isinstance(said, AnnounceMoved)]
    there_and_back = [(False, 0.5), (True, 0.25)]
    assert [(said.restored, said.seconds) for said in told] == there_and_back
    assert {(said.run_id, said.storage, said.device, said.size_bytes) for said in told} == {
        (RUN, "weights", GPU, GPU_PAGE)
    }


def test_everybody_who_has_it_mapped_has_to_park_it() -> None:
    lone = Lone(parked=False)
    lone.drive.open(ENCODER)
    lone.park()
    assert not lone.drive.moves
    lone.drive.park(ENCODER, lone.storage)
    assert lone.drive.moves


def test_a_lease_waits_for_room_that_a_storage_may_leave() -> None:
    lone = Lone(parked=False)
    both = lone.drive.allocate(ENCODER, LEARNER, size_pages=2 * GPU_PAGE // PAGE)
    assert lone.drive.waits(both)
    lone.park()
    lone.drive.end_move()
    assert lone.drive.answer(both) is not None
    hold = lone.hold(1)
    three = lone.drive.allocate(LEARNER, ENCODER, size_pages=3 * GPU_PAGE // PAGE)
    with pytest.raises(ArenaFull, match="waiting cannot help"):
        lone.drive.answer(three)
    assert lone.drive.waits(hold)


def test_what_is_only_expected_gives_way_to_who_waits_for_room() -> None:
    lone = spilled()
    lone.drive.prefetch(LEARNER, lone.storage)
    lone.drive.end_move()
    assert lone.rows[0] == (GPU, "readable(v0)")
    both = lone.drive.allocate(ENCODER, LEARNER, size_pages=2 * GPU_PAGE // PAGE)
    assert lone.rows[0] == (GPU, "spilling readable(v0)")
    lone.drive.end_move()
    assert lone.drive.answer(both) is not None
    hold = lone.hold(1)
    lone.drive.abandon(ENCODER, lone.drive.answer(both).lease_id)
    lone.drive.end_move()
    assert lone.drive.answer(hold).handle.life == 2


def test_what_is_only_expected_comes_after_who_waits_for_room() -> None:
    lone = spilled()
    one = lone.drive.lease(ENCODER, LEARNER)
    both = lone.drive.allocate(ENCODER, LEARNER, size_pages=2 * GPU_PAGE // PAGE)
    lone.drive.prefetch(LEARNER, lone.storage)
    assert lone.drive.waits(both)
    assert not lone.drive.moves
    assert not lone.wanted
    lone.drive.abandon(ENCODER, one)
    lone.drive.abandon(ENCODER, lone.drive.answer(both).lease_id)
    lone.drive.end_move()
    assert lone.rows[0] == (GPU, "readable(v0)")


def test_what_is_parked_again_is_expected_no_more() -> None:
    lone = spilled()
    lone.drive.prefetch(LEARNER, lone.storage)
    lone.drive.end_move()
    assert lone.rows[0] == (GPU, "readable(v0)")
    lone.park()
    lone.drive.end_move()
    assert lone.rows == [(COPIES, "spilled readable(v0)")]


@pytest.mark.parametrize("back", [False, True], ids=["away", "back already"])
def test_what_is_only_expected_gives_way_to_a_hold_on_another_storage(back: bool) -> None:
    lone = Lone(copies_pages=2 * GPU_PAGE // PAGE)
    drive = lone.drive
    drive.end_move()
    other = drive.answer(drive.open(LEARNER, SPEC, name="other")).storage_id
    drive.publish(LEARNER, drive.answer(drive.hold(LEARNER, other, HoldKind.WRITE)).hold_id)
    drive.park(LEARNER, other)
    drive.end_move()
    # That leaves room for one of the two, or for none.
    drive.lease(ENCODER, LEARNER)
    more = None if back else drive.lease(ENCODER, LEARNER)
    drive.prefetch(LEARNER, lone.storage)
    if back:
        drive.end_move()
        assert lone.rows[0] == (GPU, "readable(v0)")
    hold = drive.hold(LEARNER, other, HoldKind.READ)
    if more is not None:
        drive.abandon(ENCODER, more)
    while drive.moves:
        drive.end_move()
    assert drive.answer(hold).handle.life == 1
    assert lone.rows == [(COPIES, "spilled readable(v0)")]


def test_the_death_of_the_last_who_has_it_mapped_is_as_good() -> None:
    lone = Lone(parked=False)
    lone.drive.open(ENCODER)
    lone.park()
    lone.drive.kill(ENCODER)
    assert lone.drive.moves


def test_after_the_death_of_the_only_one_it_leaves() -> None:
    lone = Lone(parked=False)
    lone.drive.kill(LEARNER)
    lone.drive.end_move()
    assert lone.rows == [(COPIES, "spilled readable(v0)")]


def test_without_memory_for_the_copy_it_stays_after_a_death() -> None:
    lone = Lone(parked=False)
    lone.drive.kill(LEARNER)
    lone.drive.end_move(fail=True)
    assert lone.rows == [(GPU, "readable(v0)")]
    assert not lone.drive.moves
    lone.drive.join(LEARNER)
    opened = lone.drive.answer(lone.drive.open(LEARNER, SPEC))
    lone.drive.park(LEARNER, opened.storage_id)
    assert isinstance(lone.drive.moves[0], SpillMemory)


def test_a_park_that_crossed_a_hold_changes_nothing() -> None:
    lone = Lone(parked=False)
    held = lone.drive.answer(lone.hold(1))
    lone.park()
    lone.drive.let_go(LEARNER, held.hold_id, untouched=True)
    assert lone.rows == [(GPU, "readable(v0)")]
    lone.park()
    assert lone.rows[0] == (GPU, "spilling readable(v0)")


def test_a_hold_that_comes_while_it_is_copied_brings_it_back_afterwards() -> None:
    lone = Lone()
    hold = lone.hold(1)
    lone.drive.end_move()
    assert isinstance(lone.drive.moves[0], RestoreMemory)
    assert lone.drive.waits(hold)
    lone.drive.end_move()
    assert lone.drive.answer(hold).version == 1


def test_a_cancelled_hold_lets_it_leave_again() -> None:
    lone = spilled()
    hold = lone.hold(1)
    lone.drive.cancel(LEARNER, hold)
    lone.drive.end_move()
    assert isinstance(lone.drive.moves[0], SpillMemory)


def test_prefetch_brings_it_back_and_keeps_it() -> None:
    lone = spilled()
    lone.drive.prefetch(LEARNER, lone.storage)
    lone.drive.prefetch(LEARNER, lone.storage)
    lone.drive.end_move()
    assert (lone.rows[0], lone.drive.moves) == ((GPU, "readable(v0)"), [])
    assert lone.drive.answer(lone.hold(1)).handle.life == 1


def test_prefetch_of_what_is_mapped_does_not_keep_it() -> None:
    lone = Lone(parked=False)
    lone.drive.prefetch(LEARNER, lone.storage)
    lone.park()
    assert lone.drive.moves


def test_what_cannot_be_granted_anyway_leaves_it_where_it_is() -> None:
    lone = spilled()
    stale = lone.drive.hold(ENCODER, lone.storage, HoldKind.READ, version=-1)
    assert isinstance(lone.drive.refusal(stale), StaleVersion)
    undeclared = lone.drive.hold(REFERENCE, lone.storage, HoldKind.READ)
    assert isinstance(lone.drive.refusal(undeclared), NotDeclared)
    later = lone.drive.hold(ENCODER, lone.storage, HoldKind.READ, version=1)
    assert lone.drive.waits(later)
    assert not lone.drive.moves


def test_an_opener_gets_it_when_it_is_back() -> None:
    lone = spilled()
    other = lone.drive.open(LEARNER, replace(SPEC, readers=()))
    assert "readers" in str(lone.drive.refusal(other))
    assert not lone.drive.moves
    opening = lone.drive.open(ENCODER)
    assert lone.drive.waits(opening)
    lone.drive.end_move()
    opened = lone.drive.answer(opening)
    assert (opened.version, opened.handle.life, opened.spillable) == (0, 1, True)
    lone.park()
    assert not lone.drive.moves


def test_an_opener_in_vain_is_told_where_it_is() -> None:
    lone = spilled()
    lone.drive.lease(LEARNER, ENCODER, size_pages=2 * GPU_PAGE // PAGE)
    opening = lone.drive.open(ENCODER, timeout_s=5)
    lone.drive.pass_time(5)
    refusal = lone.drive.refusal(opening)
    assert isinstance(refusal, BrokerTimeout)
    assert "is spilled readable(v0) and was not restored in time" in str(refusal)


def test_a_full_budget_is_waited_for_until_the_holds_deadline() -> None:
    lone = spilled()
    lease = lone.drive.sealed(ENCODER, LEARNER, size_pages=2 * GPU_PAGE // PAGE)
    first, second = lone.hold(1, timeout_s=1), lone.hold(1, timeout_s=100)
    assert [(w.device, w.size_bytes) for w in lone.wanted] == [(GPU, GPU_PAGE)]
    lone.drive.pass_time(AGAIN_S / 2)
    assert len(lone.wanted) == 1
    lone.drive.pass_time(AGAIN_S / 2)
    assert len(lone.wanted) == 2
    lone.drive.pass_time(1)
    refusal = lone.drive.refusal(first)
    assert isinstance(refusal, BrokerTimeout)
    assert "the storage is spilled readable(v0), held by nobody" in str(refusal)
    assert f"arena {GPU}: " in str(refusal)
    assert f"{GPU_PAGE}  weights  run run" in str(refusal)
    lone.drive.abandon(ENCODER, lease)
    lone.drive.end_move()
    assert lone.drive.answer(second).version == 1


def test_a_device_without_memory_is_asked_again_after_a_while() -> None:
    lone = spilled()
    hold = lone.hold(1)
    lone.drive.end_move(fail=True)
    assert lone.rows == [(COPIES, "spilled readable(v0)")]
    assert len(lone.wanted) == 1
    lone.drive.begin(2)
    assert not lone.drive.moves
    assert lone.drive.state.next_deadline_ns() == lone.drive.now_ns + AGAIN_NS
    lone.drive.pass_time(AGAIN_S)
    lone.drive.end_move()
    assert lone.drive.answer(hold).handle.life == 1


def test_nobody_is_called_for_what_nobody_wants_any_more() -> None:
    lone = spilled()
    lone.hold(1, timeout_s=0.1)
    lone.drive.end_move(fail=True)
    lone.drive.pass_time(0.1)
    lone.drive.pass_time(100)
    assert len(lone.wanted) == 1
    assert lone.drive.state.next_deadline_ns() is None


def test_without_memory_for_the_copy_it_stays_until_it_is_parked_again() -> None:
    lone = Lone()
    hold = lone.hold(1)
    lone.drive.end_move(fail=True)
    held = lone.drive.answer(hold)
    assert held.handle.life == 0
    assert used(lone) == {"cpu": 0, GPU: GPU_PAGE, COPIES: 0}
    lone.drive.publish(LEARNER, held.hold_id)
    assert not lone.drive.moves
    lone.park()
    lone.drive.end_move()
    assert lone.rows == [(COPIES, "spilled readable(v1)")]


def test_copies_have_a_budget_and_what_may_be_spilled_has_its_part() -> None:
    lone = Lone(parked=False)
    second = lone.drive.answer(lone.drive.open(LEARNER, SPEC, name="second"))
    assert not second.spillable
    with pytest.raises(StorageMisuse, match="parks second, which is spillable on"):
        lone.drive.park(LEARNER, second.storage_id)
    # Its room is not room that a wait may bring.
    with pytest.raises(ArenaFull, match="waiting cannot help"):
        lone.drive.answer(lone.drive.allocate(ENCODER, LEARNER, size_pages=2 * GPU_PAGE // PAGE))
    lone.park()
    lone.drive.end_move()
    assert lone.rows == [(COPIES, "spilled readable(v0)")]
    lone.drive.do(events.RunClosed, run_id=RUN)
    lone.drive.do(events.RunOpened, run_id=RUN, epoch=Epoch(1))
    assert lone.drive.answer(lone.drive.open(LEARNER, SPEC, name="second")).spillable


def test_what_is_larger_than_the_budget_for_copies_stays_and_nobody_waits_for_its_room() -> None:
    lone = Lone(parked=False, copies_pages=GPU_PAGE // PAGE - 1)
    assert not lone.drive.answer(lone.drive.open(LEARNER)).spillable
    with pytest.raises(ArenaFull, match="waiting cannot help"):
        lone.drive.answer(lone.drive.allocate(ENCODER, LEARNER, size_pages=2 * GPU_PAGE // PAGE))


@pytest.mark.parametrize("copies_pages", [0, 1])
def test_what_cannot_be_spilled_cannot_be_parked(copies_pages: int) -> None:
    drive = Driver(copies_pages=copies_pages)
    residency = Residency.SPILLABLE if copies_pages == 0 else Residency.PINNED
    opened = drive.answer(drive.open(LEARNER, replace(SPEC, residency=residency)))
    assert not opened.spillable
    with pytest.raises(StorageMisuse, match=r"parks weights, which is .* on cpu and cannot"):
        drive.park(LEARNER, opened.storage_id)
    hold = drive.answer(drive.hold(LEARNER, opened.storage_id, HoldKind.WRITE))
    assert hold.handle is None


def test_only_who_is_declared_parks() -> None:
    lone = Lone(parked=False)
    with pytest.raises(NotDeclared, match="rollout/0 is neither reader nor writer"):
        lone.drive.park(ROLLOUT, lone.storage)


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_contents_survive_the_learner(moves: int) -> None:
    """It dies while the storage is being spilled, is spilled, or is being restored."""
    lone = Lone()
    if moves:
        lone.drive.end_move()
    if moves == 2:
        lone.hold(1)
    lone.drive.kill(LEARNER)
    lone.drive.join(LEARNER)
    opening = lone.drive.open(LEARNER, SPEC)
    while lone.drive.moves:
        lone.drive.end_move()
    opened = lone.drive.answer(opening)
    assert (opened.created, opened.version, opened.torn) == (False, 0, False)
    assert opened.handle.life == 1


def test_torn_contents_stay_torn() -> None:
    lone = Lone(parked=False)
    lone.drive.let_go(LEARNER, lone.drive.answer(lone.hold(1)).hold_id)
    lone.park()
    lone.drive.end_move()
    assert lone.rows == [(COPIES, "spilled torn(v0)")]
    reading = lone.drive.hold(ENCODER, lone.storage, HoldKind.READ)
    assert isinstance(lone.drive.refusal(reading), StorageTorn)
    hold = lone.hold(1)
    lone.drive.end_move()
    lone.drive.publish(LEARNER, lone.drive.answer(hold).hold_id)
    assert lone.rows[0] == (GPU, "readable(v1)")


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_closed_run_frees_both(moves: int) -> None:
    lone = Lone()
    hold = None
    if moves:
        lone.drive.end_move()
    if moves == 2:
        hold = lone.hold(1)
    lone.drive.do(events.RunClosed, run_id=RUN)
    assert used(lone) == {"cpu": 0, GPU: 0, COPIES: 0}
    assert not lone.drive.memory
    while lone.drive.moves:
        lone.drive.end_move()
    if hold is not None:
        assert isinstance(lone.drive.refusal(hold), UnknownRun)
    lone.drive.do(events.RunOpened, run_id=RUN, epoch=Epoch(1))
    lone.park()
    lone.drive.prefetch(LEARNER, lone.storage)
