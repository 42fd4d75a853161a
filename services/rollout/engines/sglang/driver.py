"""The engine's processes as one process of the rollout uses them: its own, on one rank."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

from services.rollout.engines.errors import EngineGone, EngineStateInvalid
from services.rollout.engines.sglang import messages
from services.rollout.engines.sglang.folder import engine_folder
from services.rollout.engines.sglang.process import EngineHost
from services.rollout.engines.sglang.wire import Frame
from services.rollout.refreshed import Refreshed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from common.config.sglang import SglangConfig
    from common.ids import GroupId, WeightsVersion
    from services.rollout.engines.sglang.messages import EngineSettings, GroupSampling
    from services.rollout.engines.sglang.weights import OfferedWeights

log = logging.getLogger(__name__)

_POLL_S = 0.1
"""Longest wait of `reports`: so soon an abort gets its turn."""


class Driver(Protocol):
    """Raises in all calls: EngineGone if the processes end or do not answer; EngineRefused with
    SGLang's reason."""

    @property
    def pid(self) -> int:
        """Of the host and of its process group; 0: none runs here."""

    @property
    def trouble(self) -> str:
        """See `Engine.trouble`."""

    @property
    def refreshed(self) -> Refreshed | None:
        """What the last `begin` did for the engine's weights; None: nothing yet, or not here."""

    @property
    def has_kv(self) -> bool:
        """Whether the engine has memory for keys and values on this rank's device."""

    def prepare(self) -> None:
        """Start the engine's processes if they do not run; they have no such memory then."""

    def begin(self, version: WeightsVersion) -> None:
        """Have the weights of a version taken, and memory for keys and values there."""

    def sample(self, group: GroupSampling) -> None:
        """Begin to sample a group."""

    def drop(self, group: GroupId) -> None:
        """End a group; what is on its way still comes."""

    def reports(self, decoding: Sequence[GroupId]) -> Sequence[Frame]:
        """What the engine tells, once it tells something; none if that takes long.

        Args: decoding: the groups that it is waited for.
        """

    def abort(self, *, decoding: bool) -> None:
        """End all groups; nothing of them comes any more.

        Args: decoding: whether there are any.
        """

    def release(self) -> None:
        """Give memory for keys and values back; with `release_memory = false` it stays."""

    def close(self) -> None:
        """End the processes. Idempotent."""


class HostDriver:
    """Implements `Driver` by a child process.

    Args:
        python: interpreter of the environment that has SGLang.
        config: the recipe's table.
        settings: of the engine; its model path is that of the policy.
        weights: what it reads.
        folder: of the run, for the engine's own files.
    """

    def __init__(
        self,
        python: Path,
        config: SglangConfig,
        settings: EngineSettings,
        weights: OfferedWeights,
        *,
        folder: Path,
    ) -> None:
        self._python = python
        self._config = config
        self._settings = settings
        self._weights = weights
        self._folder = folder
        self._host: EngineHost | None = None
        self._heard_s = 0.0
        self._closed = False
        self._lost = ""
        """What was the trouble with processes that are being started anew."""
        self._has_kv = False
        self._refreshed: Refreshed | None = None
        self.aliased_bytes = self.copied_bytes = 0

    @property
    def refreshed(self) -> Refreshed | None:
        """See `Driver.refreshed`."""
        return self._refreshed

    @property
    def pid(self) -> int:
        """See `Driver.pid`."""
        return self._host.pid if self._host is not None and self._running else 0

    @property
    def trouble(self) -> str:
        """See `Driver.trouble`."""
        if self._host is None:
            return self._lost
        return "" if self._host.running else f"SGLang's processes ({self._host.pid}) have ended"

    @property
    def has_kv(self) -> bool:
        """See `Driver.has_kv`."""
        return self._running and self._has_kv

    def prepare(self) -> None:
        """See `Driver.prepare`.

        Raises: EngineRefused naming parameters that no weight belongs to, or weights that no
            parameter takes.
        """
        if self._running:
            return
        self._lost = self.trouble
        self._end()
        body, descriptors = self._weights.offer()
        settings = asdict(self._settings)
        settings["model_path"] = str(engine_folder(self._folder, self._settings.model_path))
        frame = Frame(
            kind=messages.START, body={**body, "settings": settings}, descriptors=descriptors
        )
        started_s = time.monotonic()
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
        took_s = round(time.monotonic() - started_s, 1)
        log.info("SGLang is up", extra={"pid": host.pid, "seconds": took_s, **answer.body})
        self.release()

    def begin(self, version: WeightsVersion) -> None:
        """See `Driver.begin`. Raises: what `prepare` does.

        A version may come again with other contents, after a return to a checkpoint: each step
        takes the weights anew, and forgets what older ones computed.
        """
        self.prepare()
        host, copied_bytes = self._alive, self.copied_bytes
        started_s = time.monotonic()
        if not self._weights.shared:
            for bucket in self._weights.buckets():
                host.ask(bucket)
                copied_bytes += sum(tensor.nbytes for tensor in bucket.tensors.values())
        host.ask(Frame(kind=messages.REFRESH, body={"version": str(version)}))
        self._refreshed = Refreshed(
            alias_bytes=self.aliased_bytes,
            rebuild_bytes=copied_bytes,
            seconds=time.monotonic() - started_s,
        )
        if not self._has_kv:
            host.ask(Frame(kind=messages.RESUME))
            self._has_kv = True

    def sample(self, group: GroupSampling) -> None:
        """See `Driver.sample`."""
        self._alive.tell(group.frame())
        self._heard_s = time.monotonic()

    def drop(self, group: GroupId) -> None:
        """See `Driver.drop`."""
        self._alive.tell(Frame(kind=messages.DROP, body={"group": int(group)}))

    def reports(self, decoding: Sequence[GroupId]) -> Sequence[Frame]:
        """See `Driver.reports`. Raises: EngineGone too if the silence passes the deadline."""
        host, found = self._alive, []
        frame = host.report(within_s=_POLL_S)
        while frame is not None:
            found.append(frame)
            frame = host.report(within_s=0)
        if found:
            self._heard_s = time.monotonic()
        elif time.monotonic() - self._heard_s > self._config.deadline_s:
            raise host.overdue(f"groups {sorted(decoding)} decode, but there was no token")
        return found

    def abort(self, *, decoding: bool) -> None:
        """See `Driver.abort`."""
        if decoding and self._running:
            # nothing comes of processes that end meanwhile
            with contextlib.suppress(EngineGone):
                # what still comes of the step is not wanted
                self._alive.ask(Frame(kind=messages.ABORT), meanwhile=lambda _: None)

    def release(self) -> None:
        """See `Driver.release`."""
        if self.has_kv and self._settings.release_memory:
            self._alive.ask(Frame(kind=messages.RELEASE))
            self._has_kv = False

    def close(self) -> None:
        """See `Driver.close`."""
        self._end()
        if not self._closed:
            self._closed = True
            self._weights.close()

    @property
    def _running(self) -> bool:
        return self._host is not None and self._host.running

    @property
    def _alive(self) -> EngineHost:
        if self._host is None:
            raise EngineStateInvalid("the engine is not started")
        return self._host

    def _end(self) -> None:
        if self._host is not None:
            self._host.stop()
            self._host = None
