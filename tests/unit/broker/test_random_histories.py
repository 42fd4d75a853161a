"""Random histories: whatever happens in whatever order, the invariants hold and nothing leaks.

The driver validates the state after each event, and refuses a second answer to a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from common.errors import RollplexError
from common.ids import Epoch, LeaseId, Participant
from common.tensors.errors import StorageMisuse
from common.tensors.spec import Held, Placement, Residency
from common.tensors.storage import HoldKind, StorageSpec
from services.broker import events
from services.broker.instructions import (
    ReplyAcquired,
    ReplyAllocated,
    ReplyHeld,
    ReplyStorageOpened,
)
from tests.unit.broker.driver import (
    ENCODER,
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
    from services.broker.events import HoldId, StorageId

EVERYBODY = (LEARNER, ENCODER, ROLLOUT, REFERENCE)
who = st.sampled_from(EVERYBODY)
timeouts = st.sampled_from([0.0, 1.0, 50.0])
CAPACITY_PAGES = 6
GPU_PAGES = 3
COPIES_PAGES = GPU_PAGES * GPU_PAGE // PAGE
placements = st.sampled_from(Placement)


class Histories(RuleBasedStateMachine):
    """Participants that mostly follow the protocol, and sometimes do not."""

    def __init__(self) -> None:
        super().__init__()
        self.drive = Driver(
            capacity_pages=CAPACITY_PAGES,
            gpu_pages=GPU_PAGES,
            copies_pages=COPIES_PAGES,
            limit_pages=GPU_PAGES + 1,
        )
        self.epoch = 1
        self.drive.begin(1)
        self.requests: dict[int, tuple[Participant, object]] = {}
        self.filling: list[tuple[Participant, LeaseId]] = []
        self.held: list[tuple[Participant, LeaseId]] = []
        self.holds: list[tuple[Participant, HoldId, HoldKind]] = []
        self.storage: StorageId | None = None
        self.leases: list[LeaseId] = []
        self.claims: list[tuple[Participant, LeaseId]] = []

    def _collect(self) -> None:
        """Take in what was granted meanwhile."""
        for request, (participant, asked) in list(self.requests.items()):
            if self.drive.waits(request):
                continue
            del self.requests[request]
            reply = self.drive.answers[request]
            if participant not in self.drive.joined:
                continue
            match reply:
                case ReplyAllocated():
                    self.filling.append((participant, reply.lease_id))
                    self.leases.append(reply.lease_id)
                    self.claims.extend((consumer, reply.lease_id) for consumer in asked)
                case ReplyAcquired():
                    self.held.extend((participant, lease) for lease in asked)
                case ReplyStorageOpened():
                    self.storage = reply.storage_id
                case ReplyHeld():
                    self.holds.append((participant, reply.hold_id, asked))

    def _note(self, request: int, participant: Participant, asked: object = None) -> None:
        self.requests[request] = (participant, asked)
        self._collect()

    @rule(
        producer=who,
        consumers=st.lists(who, min_size=1, max_size=3, unique=True),
        size=st.sampled_from([1, 1, 1, 2, 3, CAPACITY_PAGES + 1]),
        placement=placements,
        wait=st.booleans(),
        timeout_s=timeouts,
    )
    def allocate(self, producer, consumers, size, placement, wait, timeout_s) -> None:
        request = self.drive.allocate(
            producer,
            *consumers,
            epoch=self.epoch,
            size_pages=size,
            placement=placement,
            wait=wait,
            timeout_s=timeout_s,
        )
        self._note(request, producer, tuple(consumers))

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), seal=st.sampled_from([True, True, True, False]))
    def finish_filling(self, data, seal) -> None:
        producer, lease = data.draw(st.sampled_from(self.filling))
        self.filling.remove((producer, lease))
        if seal:
            self.drive.seal(producer, lease)
        else:
            self.drive.abandon(producer, lease)
        self._collect()

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), timeout_s=timeouts, more=st.booleans())
    def acquire(self, data, timeout_s, more) -> None:
        """A consumer takes one, or all, of what was declared for it."""
        consumer, lease = data.draw(st.sampled_from(self.claims))
        wanted = [lease]
        if more:
            wanted = [claim[1] for claim in self.claims if claim[0] == consumer]
        self.claims = [c for c in self.claims if c[0] != consumer or c[1] not in wanted]
        request = self.drive.acquire(consumer, *wanted, epoch=self.epoch, timeout_s=timeout_s)
        self._note(request, consumer, tuple(wanted))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), consumer=who)
    def acquire_anything(self, data, consumer) -> None:
        wanted = data.draw(st.lists(st.sampled_from(self.leases), min_size=1, max_size=3))
        request = self.drive.acquire(consumer, *wanted, epoch=self.epoch, timeout_s=1.0)
        self._note(request, consumer, tuple(wanted))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data) -> None:
        consumer, lease = data.draw(st.sampled_from(self.held))
        self.held.remove((consumer, lease))
        self.drive.release(consumer, lease)
        self._collect()

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), participant=who)
    def release_anything(self, data, participant) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        if (participant, lease) in self.held:
            return
        try:
            self.drive.release(participant, lease)
        except RollplexError:
            return
        raise AssertionError("a release of what is not held has to be refused")

    @rule(
        creator=st.sampled_from([LEARNER, ENCODER]),
        size=st.sampled_from([1, 1, 2]),
        residency=st.sampled_from([Residency.SPILLABLE] * 5 + [Residency.PINNED]),
        placement=placements,
        timeout_s=timeouts,
    )
    def open_storage(self, creator, size, residency, placement, timeout_s) -> None:
        spec = StorageSpec(
            tensors=pages(size),
            readers=(ROLLOUT, REFERENCE),
            writers=(LEARNER, ENCODER),
            residency=residency,
            placement=placement,
        )
        self._note(self.drive.open(creator, spec, timeout_s=timeout_s), creator)

    @initialize(size=st.sampled_from([1, 2]), placement=placements)
    def begin(self, size, placement) -> None:
        """A storage that can be spilled."""
        self.open_storage(LEARNER, size, Residency.SPILLABLE, placement, 50.0)

    @rule(reader=who, timeout_s=timeouts)
    def attach(self, reader, timeout_s) -> None:
        self._note(self.drive.open(reader, timeout_s=timeout_s), reader)

    @precondition(lambda self: self.storage is not None)
    @rule(
        participant=who,
        kind=st.sampled_from(HoldKind),
        version=st.integers(0, 3),
        timeout_s=timeouts,
    )
    def hold(self, participant, kind, version, timeout_s) -> None:
        request = self.drive.hold(
            participant,
            self.storage,
            kind,
            version=version,
            epoch=self.epoch,
            timeout_s=timeout_s,
        )
        self._note(request, participant, kind)

    @precondition(lambda self: self.storage is not None)
    @rule(participant=who, everybody=st.sampled_from([True, True, True, False]))
    def park(self, participant, everybody) -> None:
        """One participant, or each, has no more use for it."""
        for one in EVERYBODY if everybody else (participant,):
            try:
                self.drive.park(one, self.storage)
            except StorageMisuse:
                rows = self.drive.state.ledger().rows
                assert all(row.residency != Residency.SPILLABLE for row in rows)
        self._collect()

    @precondition(lambda self: self.storage is not None)
    @rule(participant=who)
    def prefetch(self, participant) -> None:
        self.drive.prefetch(participant, self.storage)
        self._collect()

    @precondition(lambda self: self.drive.moves)
    @rule(fail=st.sampled_from([False, False, False, True]))
    def end_move(self, fail) -> None:
        self.drive.end_move(fail=fail)
        self._collect()

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), publish=st.booleans(), untouched=st.booleans())
    def end_hold(self, data, publish, untouched) -> None:
        participant, hold, kind = data.draw(st.sampled_from(self.holds))
        self.holds.remove((participant, hold, kind))
        if publish and kind is HoldKind.WRITE:
            self.drive.publish(participant, hold)
        else:
            self.drive.let_go(participant, hold, untouched=untouched)
        self._collect()

    @rule(
        participant=who,
        size=st.integers(0, 3),
        placement=placements,
        timeout_s=st.none() | timeouts,
    )
    def reserve(self, participant, size, placement, timeout_s) -> None:
        request = self.drive.ask(
            participant,
            events.ReserveMemory,
            run_id=RUN,
            name="mine",
            placement=placement,
            size_bytes=size * 4096,
            away_bytes=(3 - size) * 4096,
            deadline_ns=None if timeout_s is None else self.drive.deadline(timeout_s),
        )
        self._note(request, participant)

    @rule(participant=who, size=st.integers(0, 2), name=st.sampled_from(Held))
    def hold_own(self, participant, size, name) -> None:
        self.drive.hold_own(participant, size, name)
        self._collect()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        request = data.draw(st.sampled_from(sorted(self.requests)))
        self.drive.cancel(self.requests[request][0], request)
        self._collect()

    @rule(seconds=st.sampled_from([0.5, 10.0]))
    def pass_time(self, seconds) -> None:
        self.drive.pass_time(seconds)
        self._collect()

    @rule(participant=who, what=st.sampled_from(["death", "death", "abort", "step", "close"]))
    def disturb(self, participant, what) -> None:
        if what == "death":
            self._bury(participant)
            self.drive.join(participant)
        if what == "close":
            self.drive.do(events.RunClosed, run_id=RUN)
            self.drive.do(events.RunOpened, run_id=RUN, epoch=Epoch(self.epoch))
            self.storage = None
            self.holds.clear()
        if what == "abort":
            self.drive.abort(self.epoch)
        if what != "death":
            self.epoch += 1
            self.drive.begin(self.epoch)
        self._collect()

    @invariant()
    def memory_is_the_ledger(self) -> None:
        rows = self.drive.state.ledger().rows
        known = {row.generation for row in rows if row.generation is not None}
        assert known == self.drive.memory

    def teardown(self) -> None:
        self.drive.abort(self.epoch)
        self._collect()
        for participant, lease in self.held:
            self.drive.release(participant, lease)
        for participant, lease in self.filling:
            self.drive.abandon(participant, lease)
        assert self.drive.state.lease_states() == {}
        for participant in self.drive.joined:
            self.drive.kill(participant)
        self.drive.do(events.RunClosed, run_id=RUN)
        assert self.drive.state.ledger().used_bytes == 0
        assert not self.drive.memory
        assert self.drive.state.next_deadline_ns() is None

    def _bury(self, participant: Participant) -> None:
        self.drive.kill(participant)
        self.requests = {k: v for k, v in self.requests.items() if v[0] != participant}
        self.filling = [item for item in self.filling if item[0] != participant]
        self.held = [item for item in self.held if item[0] != participant]
        self.holds = [item for item in self.holds if item[0] != participant]


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
