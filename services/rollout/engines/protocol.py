"""What the rollout service asks of an engine.

An engine decodes the groups of one step. Its batch is a function of the step's content: groups
are admitted strictly in the order of the step, and while a place is free the next group has to be
admitted before the batch decodes on, however long it takes to become ready. The service's loop:

    engine.begin_step(spec)
    while not engine.finished:
        # meanwhile: add_group for each group that became ready, drop_group for each that will not
        while engine.admit_next() is not None: ...
        if engine.needs_next_group():
            wait for an event
        elif engine.decodes():
            publish(engine.run_iteration().finished)
    engine.release()

Each call in the loop is one bounded piece of work, so that `abort` can come in between. An engine
is called by one thread at a time: `prepare` and `close` come while nothing else runs.

Shapes: G responses of a group, T tokens of all of them, packed one response after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from common.ids import GroupId, StepIndex, WeightsVersion
    from common.rl.sampling import SamplingParams
    from common.vlm.prefix import PrefixKV
    from common.vlm.prompt import PromptTensors
    from services.rollout.refreshed import Refreshed


class FinishReason(IntEnum):
    """Why a response ended."""

    STOP = 0
    """With a stop token, which is its last token."""
    LENGTH = 1
    """At the largest number of tokens, or where its recording ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """What an engine has to know of a step before its first group."""

    step: StepIndex
    weights_version: WeightsVersion
    seed: int
    """The run's seed."""
    groups: tuple[GroupId, ...]
    """All groups of the step, in their order."""
    samples_per_group: int
    params: SamplingParams
    forced: bool = False
    """Every group comes with recorded responses, which are fed instead of sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedResponses:
    """Responses of an earlier decode."""

    tokens: Tensor
    """[T] int64."""
    lengths: Tensor
    """[G] int64; they sum to T."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """One group that is ready to decode."""

    group: GroupId
    prompt: PromptTensors
    """On the host, or on the engine's device; its pixels are not read and may be empty."""
    prefix: PrefixKV | None = None
    """Policy prefix K/V, such as views of a lease, to be copied at the admission; None: the engine
    runs the prefix forward itself."""
    vision: Tensor | None = None
    """[V, hidden] vision embeddings for the engine's own prefix forward; None: there are none, or
    `encode` makes them."""
    encode: Callable[[], Tensor] | None = None
    """Makes them, with the weights that the engine reads: at the admission, so that all ranks of a
    rollout do it at the same place in the order of their work."""
    recorded: RecordedResponses | None = None
    """Only and always in a forced step."""
    limits: tuple[int, ...] | None = None
    """[G] most tokens of each response, at least 1; None: the step's own limit for all. A recording
    has its own lengths."""

    def embeddings(self) -> Tensor | None:
        """[V, hidden]; to be asked for once, at the admission."""
        return self.vision if self.encode is None else self.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """A group whose responses are complete."""

    group: GroupId
    tokens: Tensor
    """[T] int64, on the host; a stop token is part of its response."""
    lengths: Tensor
    """[G] int64, on the host."""
    logprobs: Tensor
    """[T] float32, on the host; see `common.rl.sampling.sample` for the distribution."""
    finish_reasons: Tensor
    """[G] uint8 of `FinishReason`, on the host."""
    decode_iteration: int
    """Number, from 1, of the step's iteration that gave the group's last token."""
    weights_version: WeightsVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """What one iteration did, or several that were heard of at once."""

    number: int
    """From 1 in each step; of several, of the last one."""
    count: int
    """How many it were; 0: none."""
    rows: int
    """Tokens that they gave: in each, one for every sequence that was decoding."""
    finished: tuple[FinishedGroup, ...]
    """Groups that it completed, in the order of the step."""


class Engine(Protocol):
    """See the module's description for the order of calls."""

    @property
    def capacity(self) -> int:
        """Groups of the present step that can decode at the same time."""

    @property
    def active_rows(self) -> int:
        """Sequences that decode at the moment."""

    @property
    def memory_bytes(self) -> int:
        """Device bytes that the engine's K/V occupy at the moment."""

    @property
    def refreshed(self) -> Refreshed | None:
        """What it took to give the engine the step's weights; None: it reads those that are held,
        or another rank tells."""

    @property
    def trouble(self) -> str:
        """What keeps the engine from decoding, for the health check; empty: nothing. Any thread."""

    @property
    def finished(self) -> bool:
        """Whether every group of the step is complete or dropped, or there is no step."""

    def prepare(self) -> None:
        """Make sure that a step can begin, also after a failed one. May take long. Idempotent."""

    def begin_step(self, spec: StepSpec) -> None:
        """Start a step. The previous one must have been finished or aborted."""

    def add_group(self, request: GroupRequest) -> None:
        """Say that a group is ready; no work is done yet. Groups may come in any order.

        Nothing comes of it if the group was dropped before.
        """

    def drop_group(self, group: GroupId) -> None:
        """Say that a group is not wanted any more, at whatever point of its life. Idempotent.

        It need not be added; if it was, it is not admitted; if it decodes, its sequences end and
        its place is free. It will not be among the finished groups, unless it was already.
        """

    def admit_next(self) -> GroupId | None:
        """Admit the next group of the order if it is ready and there is a place.

        Returns: the group, whose `prefix` and `vision` are not needed any more; None if there is
            nothing to admit now.
        """

    def needs_next_group(self) -> bool:
        """Whether the batch may not decode on until the next group is added or dropped."""

    def decodes(self) -> bool:
        """Whether sequences that were admitted can be given tokens now; waits for it a short while
        at most. False: their prompts are still being computed."""

    def run_iteration(self) -> Iteration:
        """Give every decoding sequence one more token, or report that none was given yet."""

    def abort(self) -> None:
        """Drop the step and all its groups. Idempotent."""

    def release(self) -> None:
        """Give all K/V memory back to the device. Only between steps. Idempotent."""

    def close(self) -> None:
        """Give up everything, processes included. Idempotent."""
