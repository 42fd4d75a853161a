"""SGLang behind the engine protocol.

Groups are admitted in the step's order, as in the native engine, but the batch that decodes is
SGLang's own affair: it goes on while the service waits for a group, and its numerics depend on it.

Shapes: G = responses of a group.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from services.rollout.engines.decoding import check_limits
from services.rollout.engines.errors import EngineStateInvalid, GroupRequestInvalid
from services.rollout.engines.order import AdmissionOrder
from services.rollout.engines.protocol import Iteration
from services.rollout.engines.sglang import messages
from services.rollout.engines.sglang.folder import engine_folder
from services.rollout.engines.sglang.group import SampledGroup, sampling_parameters
from services.rollout.engines.sglang.messages import GroupSampling, SampledResponse
from services.rollout.engines.sglang.process import EngineHost
from services.rollout.engines.sglang.wire import Frame

if TYPE_CHECKING:
    from pathlib import Path

    from common.config.sglang import SglangConfig
    from common.ids import GroupId, WeightsVersion
    from services.rollout.engines.protocol import FinishedGroup, GroupRequest, StepSpec
    from services.rollout.engines.sglang.messages import EngineSettings
    from services.rollout.engines.sglang.weights import OfferedWeights

log = logging.getLogger(__name__)

_POLL_S = 0.1
"""Longest piece of work of `run_iteration`: so soon an abort gets its turn."""


class SglangEngine:
    """Implements `services.rollout.engines.protocol.Engine` by a child process.

    Args:
        python: interpreter of the environment that has SGLang.
        config: the recipe's table.
        settings: of the engine; its model path is that of the policy.
        weights: what it reads.
        folder: of the run, for the engine's own files.
        kv_bytes: of the places for keys and values.
    """

    def __init__(
        self,
        python: Path,
        config: SglangConfig,
        settings: EngineSettings,
        weights: OfferedWeights,
        *,
        folder: Path,
        kv_bytes: int,
    ) -> None:
        self._python = python
        self._config = config
        self._settings = settings
        self._weights = weights
        self._folder = folder
        self._kv_bytes = kv_bytes
        self._host: EngineHost | None = None
        self._spec: StepSpec | None = None
        self._order = AdmissionOrder(())
        self._groups: dict[GroupId, SampledGroup] = {}
        self._iterations = 0
        self._heard_s = 0.0
        self._closed = False
        self._lost = ""
        """What was the trouble with processes that are being started anew."""
        self._has_kv = False
        """Whether the engine has memory for keys and values."""
        self.aliased_bytes = self.copied_bytes = 0
        self.cached_tokens = 0
        """Prompt tokens of the step's responses that were not computed anew, added up."""

    # ---------------------------------------------------------------- processes

    @property
    def running(self) -> bool:
        """Whether the engine's host runs."""
        return self._host is not None and self._host.running

    @property
    def pid(self) -> int:
        """Of the host and of its process group; 0: it does not run."""
        return self._host.pid if self._host is not None and self.running else 0

    @property
    def trouble(self) -> str:
        """See `Engine.trouble`."""
        if self._host is None:
            return self._lost
        return "" if self._host.running else f"SGLang's processes ({self._host.pid}) have ended"

    def prepare(self) -> None:
        """See `Engine.prepare`: starts the engine's processes if they do not run.

        Raises: EngineRefused with SGLang's reason, or naming parameters that no weight belongs to,
            or weights that no parameter takes; EngineGone if the processes end or do not answer.
        """
        if self.running:
            return
        self._lost = self.trouble
        self._end()
        body, descriptors = self._weights.offer()
        settings = asdict(self._settings)
        settings["model_path"] = str(engine_folder(self._folder, self._settings.model_path))
        frame = Frame(
            kind=messages.START, body={**body, "settings": settings}, descriptors=descriptors
        )
        host = EngineHost(self._python, deadline_s=self._config.deadline_s)
        try:
            answer = host.ask(frame, deadline_s=self._config.start_s)
        except BaseException:
            host.kill()
            raise
        self._host = host
        self._lost = ""
        self._has_kv = True
        self.aliased_bytes = answer.body["aliased_bytes"]
        self.copied_bytes = answer.body["copied_bytes"]
        log.info("SGLang is up", extra={"pid": host.pid, **answer.body})
        self._release_kv()

    def close(self) -> None:
        """See `Engine.close`."""
        self._end()
        if not self._closed:
            self._closed = True
            self._weights.close()

    def _end(self) -> None:
        if self._host is not None:
            self._host.stop()
            self._host = None

    # ---------------------------------------------------------------- protocol

    @property
    def capacity(self) -> int:
        """See `Engine.capacity`."""
        if self._spec is None:
            return 0
        places = self._settings.max_requests // self._spec.samples_per_group
        return min(places, len(self._spec.groups))

    @property
    def active_rows(self) -> int:
        """See `Engine.active_rows`."""
        return sum(group.missing for group in self._groups.values())

    @property
    def memory_bytes(self) -> int:
        """See `Engine.memory_bytes`."""
        return self._kv_bytes if self.running and self._has_kv else 0

    @property
    def finished(self) -> bool:
        """See `Engine.finished`."""
        return not self._groups and self._order.next_group is None

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
        if not 1 <= spec.samples_per_group <= self._settings.max_requests:
            raise GroupRequestInvalid(
                f"samples_per_group = {spec.samples_per_group}: must be from 1 to the engine's "
                f"{self._settings.max_requests} places"
            )
        self.prepare()
        self._take_weights(spec.weights_version)
        if not self._has_kv:
            self._running_host.ask(Frame(kind=messages.RESUME))
            self._has_kv = True
        self._spec = spec
        self._order = AdmissionOrder(spec.groups)
        self._iterations = self.cached_tokens = 0

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
            self._running_host.tell(Frame(kind=messages.DROP, body={"group": int(group)}))

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
        self._running_host.tell(sampling.frame())
        if not self._groups:
            self._heard_s = time.monotonic()
        self._groups[request.group] = group
        return request.group

    def needs_next_group(self) -> bool:
        """See `Engine.needs_next_group`; what decodes goes on meanwhile."""
        return self._must_admit and not self._order.next_is_ready

    def run_iteration(self) -> Iteration:
        """See `Engine.run_iteration`: waits for a decode step, a short while at most.

        Returns: no rows if none came meanwhile.
        Raises: EngineStateInvalid if a group has to be admitted first, or none decodes; EngineGone
            if the engine is silent for too long; EngineRefused if it failed in a group;
            NonFiniteLogits; VersionMismatch if other weights have sampled a response.
        """
        if self._must_admit:
            raise EngineStateInvalid(f"group {self._order.next_group} has to be admitted first")
        if not self._groups:
            raise EngineStateInvalid("no group is decoding")
        host = self._running_host
        rows = 0
        frame = host.report(within_s=_POLL_S)
        if frame is None and time.monotonic() - self._heard_s > self._config.deadline_s:
            raise host.overdue(f"groups {sorted(self._groups)} decode, but there was no token")
        while frame is not None:
            self._heard_s = time.monotonic()
            rows += self._take(frame)
            frame = host.report(within_s=0)
        if rows:
            self._iterations += 1
        return Iteration(number=self._iterations, rows=rows, finished=self._collect())

    def abort(self) -> None:
        """See `Engine.abort`."""
        decoded = bool(self._groups)
        self._groups = {}
        self._order = AdmissionOrder(())
        if decoded and self.running:
            # what still comes of the step is not wanted
            self._running_host.ask(Frame(kind=messages.ABORT), meanwhile=lambda _: None)

    def release(self) -> None:
        """See `Engine.release`; with `release_memory = false` the places stay SGLang's."""
        if not self.finished:
            raise EngineStateInvalid(f"step {self._step.step} is not finished: abort it first")
        if self.running:
            self._release_kv()

    # ---------------------------------------------------------------- inside

    @property
    def _step(self) -> StepSpec:
        if self._spec is None:
            raise EngineStateInvalid("no step has begun")
        return self._spec

    @property
    def _running_host(self) -> EngineHost:
        if self._host is None:
            raise EngineStateInvalid("the engine is not started")
        return self._host

    @property
    def _must_admit(self) -> bool:
        """Whether there is a place and a group that takes it."""
        return len(self._groups) < self.capacity and self._order.next_group is not None

    def _release_kv(self) -> None:
        if self._has_kv and self._settings.release_memory:
            self._running_host.ask(Frame(kind=messages.RELEASE))
            self._has_kv = False

    def _take_weights(self, version: WeightsVersion) -> None:
        """Have the engine read the weights of a version, and forget what older ones computed.

        A version may come again with other contents, after a return to a checkpoint: each step
        takes them anew.
        """
        host = self._running_host
        if self._weights.shared is None:
            for bucket in self._weights.buckets():
                host.ask(bucket)
        host.ask(Frame(kind=messages.REFRESH, body={"version": str(version)}))

    def _take(self, frame: Frame) -> int:
        """Fold a report in; how many tokens it tells of."""
        if frame.kind == messages.PROGRESS:
            return int(frame.body["tokens"])
        group = self._groups.get(frame.body["group"])
        if group is None:
            return 0  # it was dropped meanwhile
        if frame.kind == messages.BROKE:
            raise group.broke(frame.body["message"])
        response = SampledResponse.of(frame)
        group.add(response)
        self.cached_tokens += response.cached_tokens
        return 0

    def _collect(self) -> tuple[FinishedGroup, ...]:
        complete = [name for name, group in self._groups.items() if not group.missing]
        return tuple(self._groups.pop(name).finish(self._iterations) for name in sorted(complete))
