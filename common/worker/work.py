"""What each worker service implements: the run's model parts, and the work of one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from common.events.bodies import ModelRole
    from common.ids import Epoch, GroupId, WeightsVersion
    from common.step.machine import Lane
    from common.step.tasks import Task
    from common.vlm.model import SplitModel
    from common.vlm.parallel.pieces import Piece
    from common.worker.context import RunContext
    from common.worker.scope import StepScope


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Answer to a configuration: the worker can take part in a step."""

    weights_version: WeightsVersion | None = None
    """Learner: the version that it holds and that is durable."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """For people and metrics, such as the number of parameters."""


class HeldRead(Protocol):
    """A right to read, as `common.tensors.storage.Hold` has it."""

    def release(self) -> None:
        """Let go. Any thread; idempotent."""

    def __enter__(self) -> Self:
        """Released at the end of the block."""

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let go."""


Held = TypeVar("Held", bound=HeldRead, covariant=True)


class HeldWeights(Protocol[Held]):
    """Weights that have versions: a storage, or several with what is made of them."""

    async def hold_read(
        self, version: WeightsVersion, *, timeout_s: float = 60.0, passing: bool = False
    ) -> Held:
        """As `Storage.hold_read`."""

    def park_again(self) -> None:
        """As `Storage.park_again`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadWeights:
    """Weights that a worker reads."""

    role: ModelRole
    storage: HeldWeights[HeldRead]
    """What has to be held while they are read."""
    model: SplitModel
    """Whose parameters they are."""
    pieces: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)
    """Of `ModelShape`; of parameters that are not there, there is one piece."""


class StepWork(Protocol):
    """The work of one epoch. Methods run in the event loop; compute goes through the scope."""

    async def run(self, task: Task, group: GroupId | None, cause_id: str) -> None:
        """Do one task and publish its event; whatever it raises ends the epoch."""

    def forget(self, group: GroupId) -> None:
        """The group was dropped: nothing of it is needed any more."""

    async def advance(self) -> None:
        """An event was folded into the view: give back what no later task needs."""

    def close(self) -> None:
        """Drop tensors and graphs. Runs in the compute thread, before the scope's `close`."""


class RunWork(Protocol):
    """One worker's part in a run, for one connection to the broker."""

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Which tasks this service does, and which of them share an executor."""

    @property
    def keeps_cache(self) -> bool:
        """Whether device memory that an epoch has left in the process's cache stays there.

        For what the next epoch begins with; it goes back when somebody wants memory.
        """

    @property
    def trouble(self) -> str:
        """What keeps it from working, for the health check; empty: nothing."""

    async def prepare(self) -> Prepared:
        """Make sure that a step can begin; also after a failed one. Idempotent."""

    def begin(self, scope: StepScope) -> StepWork:
        """Start the work of an epoch."""

    def read_weights(self) -> Sequence[ReadWeights]:
        """The weights of each role that this service has a model of."""

    async def save_checkpoint(self, epoch: Epoch) -> tuple[Path, WeightsVersion]:
        """Write a checkpoint. Raises FailedPrecondition where the service has none."""

    async def close(self) -> None:
        """Give up model, children and storages. Idempotent."""


class RunFactory(Protocol):
    """Builds a worker's part in a run: loads the model, opens storages, starts children."""

    async def __call__(self, context: RunContext) -> RunWork:
        """Raises RollplexError if the run cannot be served."""
