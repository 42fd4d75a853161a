"""The engine's processes as several ranks of a rollout use them: the first rank drives, all hear.

Every rank makes the same calls in the same order, as the groups of a step and what the engine tells
of them are the same everywhere. An abort is no such call, nor is what follows it: it comes to each
rank by itself, and the next configuration joins the ranks anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.errors import RollplexError
from services.rollout.engines.errors import EngineGone, EngineRefused
from services.rollout.engines.sglang.messages import FAILED
from services.rollout.engines.sglang.wire import Frame, decoded, encoded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

    from common.ids import GroupId, WeightsVersion
    from services.rollout.engines.sglang.driver import Driver
    from services.rollout.engines.sglang.messages import GroupSampling
    from services.rollout.refreshed import Refreshed

_GONE = "gone"
"""Kind of a frame: the leader's call raised EngineGone; `FAILED`: another error."""


class JoinedDriver:
    """Implements `Driver` on each of several ranks.

    Args:
        group: of the ranks; the first one drives.
        driver: on that rank; None: this is another one.
        keeps_kv: whether memory for keys and values stays where it is between steps.
    """

    def __init__(self, group: ProcessGroup, driver: Driver | None, *, keeps_kv: bool) -> None:
        self._group = group
        self._driver = driver
        self._keeps_kv = keeps_kv
        self._has_kv = False
        self._aborted = False
        self._failed: RollplexError | None = None
        """What a call that only the first rank makes has raised: the next one of all does."""

    @property
    def pid(self) -> int:
        """See `Driver.pid`."""
        return 0 if self._driver is None else self._driver.pid

    @property
    def refreshed(self) -> Refreshed | None:
        """See `Driver.refreshed`: the first rank tells it, for all."""
        return None if self._driver is None else self._driver.refreshed

    @property
    def trouble(self) -> str:
        """See `Driver.trouble`: the first rank tells it."""
        return "" if self._driver is None else self._driver.trouble

    @property
    def has_kv(self) -> bool:
        """See `Driver.has_kv`."""
        return self._has_kv if self._driver is None else self._driver.has_kv

    def prepare(self) -> None:
        """See `Driver.prepare`; waits for the first rank, which starts the engine."""
        self._told(lambda driver: driver.prepare())
        self._has_kv = self._keeps_kv

    def begin(self, version: WeightsVersion) -> None:
        """See `Driver.begin`. Processes that have ended are not started again in a step."""

        def take(driver: Driver) -> None:
            if driver.trouble:
                raise EngineGone(driver.trouble)
            driver.begin(version)

        self._aborted = False
        self._failed = None
        self._told(take)
        self._has_kv = True

    def sample(self, group: GroupSampling) -> None:
        """See `Driver.sample`."""
        self._alone(lambda driver: driver.sample(group))

    def drop(self, group: GroupId) -> None:
        """See `Driver.drop`."""
        self._alone(lambda driver: driver.drop(group))

    def reports(self, decoding: Sequence[GroupId]) -> Sequence[Frame]:
        """See `Driver.reports`: all ranks get the same."""
        return self._told(lambda driver: driver.reports(decoding))

    def abort(self, *, decoding: bool) -> None:
        """See `Driver.abort`."""
        self._aborted = True
        if self._driver is not None:
            self._driver.abort(decoding=decoding)

    def release(self) -> None:
        """See `Driver.release`: behind a whole step no rank returns before it is done."""
        if self._aborted:
            if self._driver is not None:
                self._driver.release()
        elif self._has_kv and not self._keeps_kv:
            self._told(lambda driver: driver.release())
        self._has_kv = self._keeps_kv

    def close(self) -> None:
        """See `Driver.close`."""
        if self._driver is not None:
            self._driver.close()

    def _alone(self, call: Callable[[Driver], None]) -> None:
        if self._driver is not None and self._failed is None:
            try:
                call(self._driver)
            except RollplexError as error:
                self._failed = error

    def _told(self, call: Callable[[Driver], Sequence[Frame] | None]) -> Sequence[Frame]:
        """What the first rank's call returns, on all of them; what it raises, too."""
        if self._driver is None:
            return _unless_failed(self._heard())
        try:
            if self._failed is not None:
                raise self._failed
            frames = call(self._driver) or ()
        except RollplexError as error:
            kind = _GONE if isinstance(error, EngineGone) else FAILED
            self._tell([Frame(kind=kind, body={"message": str(error)})])
            raise
        self._tell(frames)
        return frames

    def _tell(self, frames: Sequence[Frame]) -> None:
        """Lengths of all frames, then their bytes."""
        parts = [encoded(frame) for frame in frames]
        self._share(torch.tensor([len(parts)]))
        if parts:
            self._share(torch.tensor([len(part) for part in parts]))
            self._share(torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8))

    def _heard(self) -> list[Frame]:
        (count,) = self._share(torch.zeros(1, dtype=torch.int64)).tolist()
        if not count:
            return []
        sizes = self._share(torch.zeros(count, dtype=torch.int64)).tolist()
        data = self._share(torch.zeros(sum(sizes), dtype=torch.uint8))
        return [decoded(part.numpy().tobytes()) for part in data.split(sizes)]

    def _share(self, tensor: torch.Tensor) -> torch.Tensor:
        """The first rank's. In the host's memory, over Gloo whatever the ranks compute on."""
        self._group.broadcast(tensor, 0).wait()
        return tensor


def _unless_failed(frames: list[Frame]) -> list[Frame]:
    """Raises: what the first rank has raised."""
    for frame in frames:
        if frame.kind == _GONE:
            raise EngineGone(frame.body["message"])
        if frame.kind == FAILED:
            raise EngineRefused(frame.body["message"])
    return frames
