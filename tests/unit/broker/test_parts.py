"""A whole of several parts that are held one after the other, on a device with room for few.

Whatever was expected, in whatever order copies end, and whoever else takes room: an update of all
parts comes to its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.tensors.parts import part_names
from common.tensors.spec import Residency
from common.tensors.storage import HoldKind, StorageSpec
from services.broker import events
from services.broker.instructions import (
    AnnounceMemoryWanted,
    AnnounceStepBegan,
    ReplyAllocated,
    RestoreMemory,
)
from services.broker.spilling import AGAIN_NS
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

if TYPE_CHECKING:
    from common.ids import LeaseId

AGAIN_S = AGAIN_NS / 1e9
SPEC = StorageSpec(tensors=pages(1), readers=(), writers=(LEARNER,), residency=Residency.SPILLABLE)
TRIES = 12
"""More failures in a row than are drawn."""


class Whole:
    """So many parts of one page of a GPU with room for a few, all of them written and away."""

    def __init__(self, parts: int, *, room: int, limit: int | None = None) -> None:
        self.drive = Driver(
            gpu_pages=room, copies_pages=parts * GPU_PAGE // PAGE, limit_pages=limit
        )
        self.drive.begin(1)
        self.parts = []
        for name in part_names("optimizer", parts):
            opening = self.drive.open(LEARNER, SPEC, name=name)
            self.settle(opening)
            self.parts.append(self.drive.answer(opening).storage_id)
            self.write(len(self.parts) - 1, 0)
        self.settle()

    def hold(self, number: int, version: int) -> int:
        return self.drive.hold(
            LEARNER, self.parts[number], HoldKind.WRITE, version=version, timeout_s=1e6
        )

    def write(self, number: int, version: int) -> None:
        """Hold a part as soon as it is there, publish and park it."""
        holding = self.hold(number, version)
        self.settle(holding)
        self.drive.publish(LEARNER, self.drive.answer(holding).hold_id)
        self.drive.park(LEARNER, self.parts[number])

    def expect(self, *numbers: int) -> None:
        for number in numbers:
            self.drive.prefetch(LEARNER, self.parts[number])

    def settle(self, request: int | None = None) -> None:
        """End all copies, or those that it takes until a request is answered."""
        while self.drive.moves and (request is None or self.drive.waits(request)):
            self.drive.end_move()

    @property
    def states(self) -> str:
        """A letter a part: r(eadable), s(pilled), S(pilling), R(estoring), w(riting)."""
        found = {}
        for row in self.drive.state.ledger().rows:
            word = row.state.split()[0].split("(")[0]
            found[row.name] = word[0].upper() if word.endswith("ing") else word[0]
        return "".join(found[name] for name in sorted(found))


def test_parts_come_in_order_as_far_as_there_is_room() -> None:
    whole = Whole(5, room=3)
    assert whole.states == "sssss"
    whole.expect(0, 1, 2, 3, 4)
    assert whole.states == "RRRss"
    whole.settle()
    assert whole.states == "rrrss"


def test_one_leaves_and_one_comes_while_one_is_held() -> None:
    whole = Whole(5, room=3)
    whole.write(0, 1)
    holding = whole.hold(1, 1)
    whole.expect(2)
    assert whole.states == "SRRss"
    whole.drive.end_move(1)
    assert not whole.drive.waits(holding)
    assert whole.states == "SWRss"


def test_a_part_that_came_too_early_leaves_for_the_one_that_is_waited_for() -> None:
    whole = Whole(4, room=2)
    whole.expect(3, 2)
    whole.settle()
    assert whole.states == "ssrr"
    holding = whole.hold(0, 1)
    assert whole.states == "ssSS"
    # Nothing was written since: nothing is copied.
    assert all(move.copied for move in whole.drive.moves)
    whole.drive.end_move()
    assert isinstance(whole.drive.moves[-1], RestoreMemory)
    whole.settle()
    assert not whole.drive.waits(holding)
    assert whole.states == "Wsss"


def test_what_comes_too_early_leaves_once_it_is_there() -> None:
    whole = Whole(2, room=1)
    whole.expect(1)
    holding = whole.hold(0, 1)
    assert whole.states == "sR"
    whole.settle()
    assert not whole.drive.waits(holding)


def test_a_part_leaves_for_one_that_the_device_has_no_memory_for() -> None:
    """The budget has room, the device has not: others have taken it."""
    whole = Whole(2, room=2)
    whole.expect(1)
    whole.settle()
    holding = whole.hold(0, 1)
    whole.drive.end_move(fail=True)
    assert whole.states == "sS"
    # What has left makes room, at once.
    whole.settle()
    assert not whole.drive.waits(holding)


def test_what_is_only_expected_does_not_find_out_one_by_one_that_there_is_no_memory() -> None:
    whole = Whole(4, room=4)
    whole.expect(0, 1, 2, 3)
    for _ in range(4):
        whole.drive.end_move(fail=True)
    assert whole.states == "ssss"
    whole.drive.pass_time(AGAIN_S / 2)
    whole.expect(0)
    assert not whole.drive.moves
    whole.drive.pass_time(AGAIN_S / 2)
    assert whole.states == "RRRR"
    whole.drive.end_move(fail=True)
    whole.drive.end_move(fail=True)
    whole.settle()
    holding = whole.hold(0, 1)
    assert whole.states == "ssSS"
    whole.settle()
    assert not whole.drive.waits(holding)


def test_memory_is_called_for_once_for_all_parts() -> None:
    whole = Whole(5, room=2)
    whole.drive.sealed(ENCODER, ROLLOUT, size_pages=2 * GPU_PAGE // PAGE)
    whole.expect(0, 1, 2, 3, 4)
    for _ in range(3):
        whole.drive.pass_time(AGAIN_S)
    wanted = [said for said in whole.drive.said if isinstance(said, AnnounceMemoryWanted)]
    assert len(wanted) == 4


def test_leases_may_take_what_parts_that_are_not_in_flight_leave() -> None:
    """Room of a step: all of the device, less what a pinned storage and three parts take."""
    whole = Whole(6, room=5)
    pinned = StorageSpec(tensors=pages(1), readers=(), writers=(LEARNER,))
    whole.drive.answer(whole.drive.open(LEARNER, pinned, name="gradients"))
    for there in ([], [0, 1, 2, 3]):
        whole.expect(*there)
        whole.settle()
        said = whole.drive.begin(2 + len(there))
        (room,) = [s.lease_room_bytes for s in said if isinstance(s, AnnounceStepBegan)]
        assert room[GPU] == (5 - 1 - 3) * GPU_PAGE


@pytest.mark.parametrize("room", [1, 2])
@pytest.mark.parametrize("victim", range(3))
def test_a_death_between_two_parts_leaves_versions_that_disagree(victim: int, room: int) -> None:
    whole = Whole(4, room=room)
    for number in range(victim + 1):
        whole.write(number, 1)
    whole.settle(whole.hold(victim + 1, 1))
    whole.drive.kill(LEARNER)
    whole.settle()
    whole.drive.join(LEARNER)
    found = []
    for name in part_names("optimizer", 4):
        opening = whole.drive.open(LEARNER, SPEC, name=name)
        whole.settle(opening)
        opened = whole.drive.answer(opening)
        found.append((opened.version, opened.torn))
        whole.drive.park(LEARNER, opened.storage_id)
    assert found == [(int(number <= victim), number == victim + 1) for number in range(4)]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), parts=st.integers(2, 5), room=st.integers(1, 3))
def test_every_update_ends(data: st.DataObject, parts: int, room: int) -> None:
    """An adversary expects parts, ends copies in any order or has them fail, and takes room."""
    room = min(room, parts)
    whole = Whole(parts, room=room, limit=room)
    drive = whole.drive
    leases: list[LeaseId] = []
    numbers = st.integers(0, parts - 1)

    def disturb() -> None:
        what = data.draw(st.sampled_from(["expect", "lease", "free", "end", "fail", "park", "own"]))
        if what == "expect":
            whole.expect(*data.draw(st.lists(numbers, max_size=parts)))
        elif what == "park":
            drive.park(LEARNER, whole.parts[data.draw(numbers)])
        elif what == "own":
            drive.hold_own(ROLLOUT, data.draw(st.integers(0, room)))
        elif what == "lease":
            reply = drive.answers[drive.allocate(ENCODER, ROLLOUT, wait=False)]
            if isinstance(reply, ReplyAllocated):
                leases.append(reply.lease_id)
        elif what == "free" and leases:
            drive.abandon(ENCODER, leases.pop())
        elif drive.moves:
            which = data.draw(st.integers(0, len(drive.moves) - 1))
            # Each has memory for its copy from its first spill on.
            comes = isinstance(drive.moves[which], RestoreMemory)
            drive.end_move(which, fail=comes and what == "fail")

    for version in (1, 2):
        for number in range(parts):
            for _ in range(data.draw(st.integers(0, 4))):
                disturb()
            holding = whole.hold(number, version)
            for _ in range(data.draw(st.integers(0, 4))):
                disturb()
            # The adversary gives up: copies end, leases and processes' own memory go.
            for lease in leases:
                drive.abandon(ENCODER, lease)
            leases.clear()
            drive.hold_own(ROLLOUT, 0)
            for _ in range(TRIES):
                whole.settle(holding)
                if not drive.waits(holding):
                    break
                drive.pass_time(AGAIN_S)
            drive.publish(LEARNER, drive.answer(holding).hold_id)
            drive.park(LEARNER, whole.parts[number])
    whole.settle()
    drive.do(events.RunClosed, run_id=RUN)
    assert drive.state.ledger().used_bytes == 0
