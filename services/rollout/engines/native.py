"""The project's own engine: continuous batching over groups that share one copy of their prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from services.rollout.engines.decoding import check_limits, split_recording
from services.rollout.engines.errors import EngineStateInvalid, GroupRequestInvalid
from services.rollout.engines.order import AdmissionOrder
from services.rollout.engines.plain import PlainStepping
from services.rollout.engines.protocol import Iteration

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.ids import GroupId
    from common.vlm.model import SplitModel
    from common.vlm.prefix import PrefixKV
    from services.rollout.engines.decoding import DecodingGroup
    from services.rollout.engines.protocol import FinishedGroup, GroupRequest, StepSpec
    from services.rollout.engines.stepping import Stepping


class NativeEngine:
    """Implements `services.rollout.engines.protocol.Engine` on the split model.

    Args:
        model: the policy; its weights are only read. If it runs on fused kernels, so does the
            decode, except in steps whose way of sampling those do not have.
        max_slots: most sequences that decode at the same time, as in the recipe.
        beside: whether others use a part of the device at the moment; a matter of speed only.
    """

    def __init__(
        self, model: SplitModel, *, max_slots: int, beside: Callable[[], bool] | None = None
    ) -> None:
        self._model = model
        self._max_slots = max_slots
        self._beside = beside
        self._spec: StepSpec | None = None
        self._order = AdmissionOrder(())
        self._decoding: list[DecodingGroup] = []
        self._stepping: Stepping | None = None
        self._iterations = 0

    trouble = ""
    """See `Engine.trouble`: it has no processes of its own."""

    @property
    def capacity(self) -> int:
        """See `Engine.capacity`."""
        if self._spec is None:
            return 0
        return min(self._max_slots // self._spec.samples_per_group, len(self._spec.groups))

    @property
    def active_rows(self) -> int:
        """See `Engine.active_rows`."""
        return sum(len(group.active) for group in self._decoding)

    @property
    def memory_bytes(self) -> int:
        """See `Engine.memory_bytes`."""
        return 0 if self._stepping is None else self._stepping.nbytes

    @property
    def refreshed(self) -> None:
        """See `Engine.refreshed`."""

    @property
    def finished(self) -> bool:
        """See `Engine.finished`."""
        return not self._decoding and self._order.next_group is None

    def prepare(self) -> None:
        """See `Engine.prepare`."""

    def begin_step(self, spec: StepSpec) -> None:
        """See `Engine.begin_step`.

        Raises: EngineStateInvalid if the previous step is not over; GroupRequestInvalid if one
            group has more responses than there are rows.
        """
        if not self.finished:
            raise EngineStateInvalid(f"step {self._step.step} is not finished: abort it first")
        if not 1 <= spec.samples_per_group <= self._max_slots:
            raise GroupRequestInvalid(
                f"samples_per_group = {spec.samples_per_group}: must be from 1 to the engine's "
                f"{self._max_slots} rows"
            )
        self.release()
        self._spec = spec
        self._order = AdmissionOrder(spec.groups)
        self._iterations = 0

    def add_group(self, request: GroupRequest) -> None:
        """See `Engine.add_group`.

        Raises: GroupRequestInvalid if the request does not fit the step; EngineStateInvalid if the
            group was added before.
        """
        spec = self._step
        if (request.recorded is not None) != spec.forced:
            needed = "with" if spec.forced else "without"
            raise GroupRequestInvalid(
                f"group {request.group}: must come {needed} recorded responses in this step"
            )
        if request.recorded is not None:
            split_recording(request.recorded, spec)
        if request.limits is not None:
            check_limits(request.limits, spec)
        self._order.add(request)

    def drop_group(self, group: GroupId) -> None:
        """See `Engine.drop_group`.

        Raises: GroupRequestInvalid for a group that the step does not have.
        """
        self._order.drop(group)
        for decoding in self._decoding:
            if decoding.group == group and self._stepping is not None:
                self._stepping.drop(decoding)
        self._decoding = [decoding for decoding in self._decoding if decoding.group != group]

    def needs_next_group(self) -> bool:
        """See `Engine.needs_next_group`."""
        return self._must_admit and not self._order.next_is_ready

    @torch.no_grad()
    def admit_next(self) -> GroupId | None:
        """See `Engine.admit_next`. Runs the group's prefix forward if no K/V was given."""
        if not self._must_admit or not self._order.next_is_ready:
            return None
        request = self._order.take_next()
        if self._stepping is None:
            self._stepping = self._make_stepping()
        self._decoding.append(self._stepping.admit(request, self._prefix(request)))
        return request.group

    def decodes(self) -> bool:
        """See `Engine.decodes`: prompts were computed at their admission."""
        return bool(self._decoding)

    @torch.no_grad()
    def run_iteration(self) -> Iteration:
        """See `Engine.run_iteration`.

        Raises: EngineStateInvalid if a group has to be admitted first, or none decodes;
            NonFiniteLogits if a group that it completes has NaN or infinite log-probabilities.
        """
        if self._must_admit:
            raise EngineStateInvalid(f"group {self._order.next_group} has to be admitted first")
        if not self._decoding or self._stepping is None:
            raise EngineStateInvalid("no group is decoding")
        # nobody waits for a place that a group could leave in this iteration
        ahead = self._order.next_group is None
        rows = self._stepping.advance(self._decoding, ahead=ahead)
        self._iterations += 1
        finished = self._collect(self._stepping)
        return Iteration(number=self._iterations, count=1, rows=rows, finished=finished)

    def abort(self) -> None:
        """See `Engine.abort`."""
        self._decoding = []
        self._order = AdmissionOrder(())
        self.release()

    def release(self) -> None:
        """See `Engine.release`."""
        if not self.finished:
            raise EngineStateInvalid(f"step {self._step.step} is not finished: abort it first")
        if self._stepping is not None:
            self._stepping.close()
            self._stepping = None

    def close(self) -> None:
        """See `Engine.close`."""
        self.abort()

    @property
    def _step(self) -> StepSpec:
        if self._spec is None:
            raise EngineStateInvalid("no step has begun")
        return self._spec

    @property
    def _must_admit(self) -> bool:
        """Whether there is a place and a group that takes it."""
        return len(self._decoding) < self.capacity and self._order.next_group is not None

    def _prefix(self, request: GroupRequest) -> PrefixKV:
        if request.prefix is not None:
            return request.prefix
        vision = request.embeddings()
        if vision is None:
            width = self._model.language.embed_tokens.embedding_dim
            vision = torch.zeros((0, width), dtype=self._model.dtype, device=self._model.device)
        return self._model.prefix_kv(request.prompt.to(self._model.device), vision)

    def _make_stepping(self) -> Stepping:
        """Each step has its own: slots of another number or size would make another batch."""
        spec, model = self._step, self._model
        if model.fused:
            # Triton has to be there only where its kernels run
            from services.rollout.engines.device import DeviceStepping, samples_on_device

            if samples_on_device(spec.params):
                return DeviceStepping(model, spec, slots=self.capacity, beside=self._beside)
        return PlainStepping(model, spec, slots=self.capacity)

    def _collect(self, stepping: Stepping) -> tuple[FinishedGroup, ...]:
        complete = [group for group in self._decoding if not group.active]
        self._decoding = [group for group in self._decoding if group.active]
        for group in complete:
            stepping.drop(group)
        return tuple(group.finish(self._iterations) for group in complete)
