"""SGLang behind the engine protocol.

Groups are admitted in the step's order, as in the native engine, but the batch that decodes is
SGLang's own affair: it goes on while the service waits for a group, and its numerics depend on it.

Shapes: G = responses of a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from services.rollout.engines.decoding import check_limits
from services.rollout.engines.errors import EngineStateInvalid, GroupRequestInvalid
from services.rollout.engines.order import AdmissionOrder
from services.rollout.engines.protocol import Iteration
from services.rollout.engines.sglang import messages
from services.rollout.engines.sglang.group import SampledGroup, sampling_parameters
from services.rollout.engines.sglang.messages import GroupSampling, SampledResponse

if TYPE_CHECKING:
    from common.ids import GroupId
    from services.rollout.engines.protocol import FinishedGroup, GroupRequest, StepSpec
    from services.rollout.engines.sglang.driver import Driver
    from services.rollout.engines.sglang.wire import Frame
    from services.rollout.refreshed import Refreshed


class SglangEngine:
    """Implements `services.rollout.engines.protocol.Engine` by processes of SGLang.

    Args:
        driver: of the processes; the engine is its owner.
        max_requests: sequences that decode at the same time.
        kv_bytes: of the places for keys and values on this rank's device.
    """

    def __init__(self, driver: Driver, *, max_requests: int, kv_bytes: int) -> None:
        self._driver = driver
        self._max_requests = max_requests
        self._kv_bytes = kv_bytes
        self._spec: StepSpec | None = None
        self._order = AdmissionOrder(())
        self._groups: dict[GroupId, SampledGroup] = {}
        self._iterations = self._heard = self._rows = self._active = 0
        self.cached_tokens = 0
        """Prompt tokens of the step's responses that were not computed anew, added up."""

    # ---------------------------------------------------------------- protocol

    @property
    def capacity(self) -> int:
        """See `Engine.capacity`."""
        if self._spec is None:
            return 0
        places = self._max_requests // self._spec.samples_per_group
        return min(places, len(self._spec.groups))

    @property
    def active_rows(self) -> int:
        """See `Engine.active_rows`: responses that have tokens, and are not complete."""
        return min(self._active, sum(group.missing for group in self._groups.values()))

    @property
    def memory_bytes(self) -> int:
        """See `Engine.memory_bytes`."""
        return self._kv_bytes if self._driver.has_kv else 0

    @property
    def refreshed(self) -> Refreshed | None:
        """See `Engine.refreshed`."""
        return self._driver.refreshed

    @property
    def trouble(self) -> str:
        """See `Engine.trouble`."""
        return self._driver.trouble

    @property
    def finished(self) -> bool:
        """See `Engine.finished`."""
        return not self._groups and self._order.next_group is None

    def prepare(self) -> None:
        """See `Engine.prepare`: starts the engine's processes if they do not run.

        Raises: EngineRefused with SGLang's reason, or naming parameters that no weight belongs to,
            or weights that no parameter takes; EngineGone if the processes end or do not answer.
        """
        self._driver.prepare()

    def begin_step(self, spec: StepSpec) -> None:
        """See `Engine.begin_step`. The caller holds the weights of the step's version.

        Raises: EngineStateInvalid if the previous step is not over; GroupRequestInvalid for a
            forced step, or if one group has more responses than the engine has places; what
            `prepare` raises; EngineRefused if the weights are not taken.
        """
        if not self.finished:
            raise EngineStateInvalid(f"step {self._step.step} is not finished: abort it first")
        if spec.forced:
            raise GroupRequestInvalid("SGLang cannot be fed with recorded responses")
        if not 1 <= spec.samples_per_group <= self._max_requests:
            raise GroupRequestInvalid(
                f"samples_per_group = {spec.samples_per_group}: must be from 1 to the engine's "
                f"{self._max_requests} places"
            )
        self._driver.begin(spec.weights_version)
        self._spec = spec
        self._order = AdmissionOrder(spec.groups)
        self._iterations = self._heard = self._rows = self._active = self.cached_tokens = 0

    def add_group(self, request: GroupRequest) -> None:
        """See `Engine.add_group`.

        Raises: GroupRequestInvalid if the request does not fit the step or brings a prefix's K/V;
            EngineStateInvalid if the group was added before.
        """
        if request.recorded is not None or request.prefix is not None:
            raise GroupRequestInvalid(
                f"group {request.group}: SGLang takes neither recorded responses nor prefix K/V"
            )
        vectors = 0 if request.vision is None else len(request.vision)
        if request.encode is None and vectors != request.prompt.vision_tokens:
            raise GroupRequestInvalid(
                f"group {request.group}: {request.prompt.vision_tokens} placeholders for "
                f"{vectors} vision embeddings"
            )
        if request.limits is not None:
            check_limits(request.limits, self._step)
        self._order.add(request)

    def drop_group(self, group: GroupId) -> None:
        """See `Engine.drop_group`.

        Raises: GroupRequestInvalid for a group that the step does not have.
        """
        self._order.drop(group)
        if self._groups.pop(group, None) is not None:
            self._driver.drop(group)

    def admit_next(self) -> GroupId | None:
        """See `Engine.admit_next`."""
        if not self._must_admit or not self._order.next_is_ready:
            return None
        request, spec = self._order.take_next(), self._step
        group = SampledGroup(request.group, spec, request.limits)
        prompt = request.prompt
        given = request.embeddings()
        vision = torch.zeros((0, 1)) if given is None else given
        sampling = GroupSampling(
            group=int(request.group),
            token_ids=prompt.token_ids.cpu(),
            positions=prompt.positions.cpu(),
            mm_token_type_ids=prompt.mm_token_type_ids.cpu(),
            vision=vision.detach().cpu(),
            limits=group.limits,
            seed=spec.seed,
            step=int(spec.step),
            sampling=sampling_parameters(spec.params),
        )
        self._driver.sample(sampling)
        self._groups[request.group] = group
        return request.group

    def needs_next_group(self) -> bool:
        """See `Engine.needs_next_group`; what decodes goes on meanwhile."""
        return self._must_admit and not self._order.next_is_ready

    def decodes(self) -> bool:
        """See `Engine.decodes`. Raises: what `run_iteration` does."""
        if not self._heard:
            self._hear()
        return self._heard > 0

    def run_iteration(self) -> Iteration:
        """See `Engine.run_iteration`: waits for a decode step, a short while at most.

        Returns: a count of 0 if none came meanwhile.
        Raises: EngineStateInvalid if a group has to be admitted first, or none decodes; EngineGone
            if the engine is silent for too long; EngineRefused if it failed in a group;
            NonFiniteLogits; VersionMismatch if other weights have sampled a response.
        """
        if self._must_admit:
            raise EngineStateInvalid(f"group {self._order.next_group} has to be admitted first")
        if self._heard == self._iterations:
            self._hear()
        count, self._iterations = self._heard - self._iterations, self._heard
        rows, self._rows = self._rows, 0
        return Iteration(number=self._iterations, count=count, rows=rows, finished=self._collect())

    def abort(self) -> None:
        """See `Engine.abort`."""
        decoding = bool(self._groups)
        self._groups = {}
        self._active = 0
        self._order = AdmissionOrder(())
        self._driver.abort(decoding=decoding)

    def release(self) -> None:
        """See `Engine.release`; with `release_memory = false` the places stay SGLang's."""
        if not self.finished:
            raise EngineStateInvalid(f"step {self._step.step} is not finished: abort it first")
        self._driver.release()

    def close(self) -> None:
        """See `Engine.close`."""
        self._driver.close()

    # ---------------------------------------------------------------- inside

    @property
    def _step(self) -> StepSpec:
        if self._spec is None:
            raise EngineStateInvalid("no step has begun")
        return self._spec

    @property
    def _must_admit(self) -> bool:
        """Whether there is a place and a group that takes it."""
        return len(self._groups) < self.capacity and self._order.next_group is not None

    def _hear(self) -> None:
        if not self._groups:
            raise EngineStateInvalid("no group is decoding")
        for frame in self._driver.reports(tuple(self._groups)):
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        """Fold a report in."""
        if frame.kind == messages.PROGRESS:
            self._heard += frame.body["steps"]
            self._rows += frame.body["tokens"]
            self._active = frame.body["active"]
            return
        group = self._groups.get(frame.body["group"])
        if group is None:
            return  # it was dropped meanwhile
        if frame.kind == messages.BROKE:
            raise group.broke(frame.body["message"])
        response = SampledResponse.of(frame)
        group.add(response)
        self.cached_tokens += response.cached_tokens

    def _collect(self) -> tuple[FinishedGroup, ...]:
        complete = [name for name, group in self._groups.items() if not group.missing]
        return tuple(self._groups.pop(name).finish(self._iterations) for name in sorted(complete))
