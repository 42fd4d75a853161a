"""Samples of jobs beside a decode and of either alone, and the rates that they give.

Rates beside a decode are from medians of the newest samples: jobs that were held up by something
else, such as the rewards' processes, must not count for more than one of many.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from typing import TYPE_CHECKING, NamedTuple

from common.governor.rates import Rates
from common.governor.table import CoRun, CoRunTable

if TYPE_CHECKING:
    from common.step.tasks import Task

SAMPLES = 16
"""Newest samples that count."""
ENOUGH = 2
"""Samples from which on a measured rate is used."""
REFRESH_STEPS = 8
"""Steps after which a decode alone is measured again."""


class _Beside(NamedTuple):
    unit_s: float
    decode_rate: float


def _newest() -> deque[float]:
    return deque(maxlen=SAMPLES)


def _newest_beside() -> deque[_Beside]:
    return deque(maxlen=SAMPLES)


class Measurements:
    """Of one process.

    The first job of a kind on a share is no sample: libraries and the allocator get ready in it.
    """

    def __init__(self, prior: CoRunTable, *, total_sms: int) -> None:
        """Args: prior: stands in for the whole GPU where a kind only runs beside decodes."""
        self._prior = prior
        self._total_sms = total_sms
        self._step = 0
        self._asked: dict[int, int] = {}
        self._alone: dict[int, deque[float]] = defaultdict(_newest)
        self._whole: dict[Task, deque[float]] = defaultdict(_newest)
        self._beside: dict[tuple[Task, int, int], deque[_Beside]] = defaultdict(_newest_beside)
        self._ready: set[tuple[Task, int, bool]] = set()

    def next_step(self) -> None:
        """A step is over."""
        self._step += 1

    # ---------------------------------------------------------------- decode alone

    def ask_alone(self, bracket: int) -> bool:
        """Whether a decode of so many rows should be watched with nothing beside it now.

        True at most once a step: whoever asks does it, and whatever comes of it.
        """
        asked = self._asked.get(bracket)
        due = asked is None or (
            asked < self._step
            and (len(self._alone[bracket]) < ENOUGH or self._step - asked >= REFRESH_STEPS)
        )
        if due:
            self._asked[bracket] = self._step
        return due

    def add_alone(self, bracket: int, iteration_s: float) -> None:
        """One iteration took so long."""
        self._alone[bracket].append(iteration_s)

    def alone_s(self, bracket: int) -> float | None:
        """Seconds of one iteration; None: not measured."""
        found = self._alone.get(bracket)
        return statistics.median(found) if found else None

    # ---------------------------------------------------------------- jobs

    def add_whole(self, task: Task, unit_s: float) -> None:
        """A job took so many seconds per unit of work on the whole GPU, while nothing decoded."""
        if self._is_ready(task, self._total_sms, beside=False):
            self._whole[task].append(unit_s)

    def add_beside(
        self, task: Task, bracket: int, share: int, *, unit_s: float, decode_rate: float
    ) -> bool:
        """The same on a share beside a decode, which went on at this rate.

        Returns: whether it is a sample.
        """
        ready = self._is_ready(task, share, beside=True)
        if ready:
            sample = _Beside(unit_s=unit_s, decode_rate=decode_rate)
            self._beside[task, bracket, share].append(sample)
        return ready

    def samples(self, task: Task, bracket: int, share: int) -> int:
        """How many count."""
        return len(self._beside.get((task, bracket, share), ()))

    def rates(self, task: Task, bracket: int, share: int) -> Rates | None:
        """As measured; None: too few samples."""
        found = self._beside.get((task, bracket, share), ())
        if len(found) < ENOUGH:
            return None
        return Rates.clamped(
            decode=statistics.median(sample.decode_rate for sample in found),
            background=self._whole_s(task) / statistics.median(sample.unit_s for sample in found),
        )

    def table(self, device: str) -> CoRunTable | None:
        """Everything measured so far, as `governor_table` takes it; None: nothing was.

        Args: device: name of the GPU.
        """
        entries = [
            CoRun(
                task=task,
                rows=bracket,
                sms=share,
                gain=round(rates.gain, 4),
                background_rate=round(rates.background, 4),
            )
            for task, bracket, share in sorted(self._beside)
            if (rates := self.rates(task, bracket, share)) is not None
        ]
        if not entries:
            return None
        return CoRunTable(device=device, device_sms=self._total_sms, entries=tuple(entries))

    def _is_ready(self, task: Task, share: int, *, beside: bool) -> bool:
        key = (task, share, beside)
        ready = key in self._ready
        self._ready.add(key)
        return ready

    def _whole_s(self, task: Task) -> float:
        """Seconds per unit on the whole GPU; from shares, by the prior, where never measured.

        The fastest sample: another service may have had part of the GPU in the others.
        """
        whole = self._whole.get(task)
        if whole:
            return min(whole)
        return statistics.median(
            sample.unit_s
            * self._prior.rates(task, bracket, share, total_sms=self._total_sms).background
            for (kind, bracket, share), found in self._beside.items()
            if kind is task
            for sample in found
        )
