"""One run-scoped storage: its version, who holds it, who waits, and who goes next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from common.actor.machine import StateCell
from common.tensors.errors import StaleVersion, StorageTorn
from common.tensors.storage import HoldKind
from services.broker.instructions import Handle
from services.broker.ledger import LedgerRow
from services.broker.residence import TRANSITIONS, Residence
from services.broker.rooms import COPIES

if TYPE_CHECKING:
    from common.errors import RollplexError
    from common.ids import Epoch, Participant, RunId
    from common.tensors.spec import Layout
    from common.tensors.storage import StorageSpec
    from services.broker.events import Generation, HoldId, Origin, StorageId


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A granted hold."""

    hold_id: HoldId
    participant: Participant
    kind: HoldKind
    version: int
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingHold:
    """A hold that is not granted yet."""

    origin: Origin
    kind: HoldKind
    version: int
    epoch: Epoch
    deadline_ns: int

    def __str__(self) -> str:
        version = "" if self.kind is HoldKind.EXCLUSIVE else f" of version {self.version}"
        return f"a {self.kind} hold{version} for {self.origin.participant}"


class Verdict(NamedTuple):
    """What is to become of a waiting hold: granted, refused with `error`, or neither yet."""

    grant: bool
    error: RollplexError | None = None


@dataclass(slots=True, kw_only=True)
class Storage:
    """A live storage. `storage.StorageBook` alone changes it.

    Readable at `version` while no WRITE hold exists and it is not torn; a WRITE hold excludes all
    other holds, so does an EXCLUSIVE one.
    """

    storage_id: StorageId
    generation: Generation
    run_id: RunId
    name: str
    spec: StorageSpec
    layout: Layout
    device: str
    size_bytes: int
    """Whole pages."""
    creator: Participant
    spillable: bool
    """Whether it may be spilled: its creator and its arena allow it."""
    version: int | None = None
    torn: str = ""
    """Who left it torn; empty: the contents are whole."""
    dirty_epoch: Epoch | None = None
    """Epoch in which a holder of EXCLUSIVE died; None once a later hold was released."""
    holds: dict[HoldId, Hold] = field(default_factory=dict)
    waiting: list[WaitingHold] = field(default_factory=list)
    cell: StateCell[Residence] = field(init=False)
    mapped: set[Participant] = field(default_factory=set)
    """Who has it mapped: opened or held it, and has not parked it since."""
    parked: set[Participant] = field(default_factory=set)
    """Who has unmapped it until it is wanted again."""
    expected: set[Participant] = field(default_factory=set)
    """Of those, who said that they will hold it soon."""
    life: int = 0
    """How often the contents have come back to the device."""
    has_copy: bool = False
    """Whether the host has memory for its contents; from its first spill on."""
    copied: bool = False
    """Whether what is in there are the contents: nobody was let in to write since."""
    uncopyable: bool = False
    """Whether the system had no memory for a copy since somebody last parked it."""
    starved: bool = False
    """Whether the device had no memory when the contents were last to come back."""
    again_ns: int = 0
    """When, while it waits for memory of its device, the node is told again."""

    def __post_init__(self) -> None:
        self.cell = StateCell(TRANSITIONS, self.name, Residence.RESIDENT)

    @property
    def resident(self) -> bool:
        """Whether it can be mapped and held."""
        return self.cell.state is Residence.RESIDENT

    @property
    def on_device(self) -> bool:
        """Whether it takes memory of its device."""
        return self.cell.state is not Residence.SPILLED

    def give_to(self, participant: Participant) -> None:
        """A participant is sent what it needs to map it."""
        self.mapped.add(participant)
        self.parked.discard(participant)
        self.expected.discard(participant)

    def lose(self, participant: Participant) -> None:
        """A participant died, and its mapping with it."""
        for users in (self.mapped, self.parked, self.expected):
            users.discard(participant)

    def may_open(self, participant: Participant) -> bool:
        """Whether a participant is declared at all."""
        return participant in self.spec.readers or participant in self.spec.writers

    def judge(self, wanted: WaitingHold) -> Verdict:
        """Decide on a waiting hold; of those that can be granted, the first waiting is."""
        verdict = self.judge_resident(wanted)
        return verdict if self.resident or not verdict.grant else Verdict(grant=False)

    def judge_resident(self, wanted: WaitingHold) -> Verdict:
        """The same, wherever the contents are."""
        if wanted.kind is HoldKind.READ:
            return self._judge_read(wanted)
        dirty = self.dirty_epoch
        if wanted.kind is HoldKind.EXCLUSIVE and dirty is not None and wanted.epoch <= dirty:
            text = (
                f"{self.name}: a holder died in epoch {dirty} while it changed the contents; they "
                "are undefined until the next epoch"
            )
            return Verdict(grant=False, error=StorageTorn(text))
        return Verdict(grant=not self.holds)

    def handle(self, participant: Participant) -> Handle:
        """What a participant needs to map it."""
        return Handle(
            generation=self.generation,
            device=self.device,
            name=self.name,
            size_bytes=self.size_bytes,
            specs=self.layout.specs,
            epoch=None,
            writable=participant in self.spec.writers,
            life=self.life,
        )

    def rows(self) -> list[LedgerRow]:
        """Its lines in the ledger: what it takes of its device, and of the host's copies."""
        devices = [self.device] if self.on_device else []
        return [self._row(device) for device in [*devices, *([COPIES] if self.has_copy else [])]]

    def _row(self, device: str) -> LedgerRow:
        return LedgerRow(
            name=self.name,
            run_id=self.run_id,
            lease_id=None,
            epoch=None,
            group=None,
            device=device,
            size_bytes=self.size_bytes,
            producer=self.creator,
            waiting_for=(),
            holders=tuple(sorted({h.participant for h in self.holds.values()}, key=str)),
            state=self.describe(),
            residency=self.spec.residency,
            until=f"run {self.run_id} closes",
            generation=self.generation,
        )

    def describe(self) -> str:
        """The state in a few words."""
        held = {hold.kind for hold in self.holds.values()}
        version = "empty" if self.version is None else f"v{self.version}"
        if HoldKind.WRITE in held:
            (hold,) = self.holds.values()
            return f"writing({version} -> v{hold.version})"
        if HoldKind.EXCLUSIVE in held:
            return "exclusive"
        text = f"torn({version})" if self.torn else f"readable({version})"
        return text if self.resident else f"{self.cell.state} {text}"

    def held_by(self) -> str:
        """Holders and their holds, in words."""
        holds = sorted(f"{hold.participant} ({hold.kind})" for hold in self.holds.values())
        return ", ".join(holds) or "nobody"

    def _judge_read(self, wanted: WaitingHold) -> Verdict:
        if any(hold.kind is not HoldKind.READ for hold in self.holds.values()):
            return Verdict(grant=False)
        if self.torn:
            text = f"{self.name} is torn: {self.torn}; it was wanted at version {wanted.version}"
            return Verdict(grant=False, error=StorageTorn(text))
        if self.version is None or wanted.version > self.version:
            return Verdict(grant=False)
        if wanted.version < self.version:
            text = (
                f"{self.name} is at version {self.version}; version {wanted.version}, which "
                f"{wanted.origin.participant} wanted, is gone"
            )
            return Verdict(grant=False, error=StaleVersion(text))
        return Verdict(grant=True)
