"""Runs the compute jobs of a background service beside the decode, and measures what comes of it.

The rollout says in shared memory what decodes. Nothing does: the job has the whole GPU. Otherwise
it runs on the stream of the share of the SMs that `common.governor` chooses, and alone among the
background services, with the token of `common.worker.sm_token`. Of several ranks, rank 0 chooses
and holds the token of its GPU for all: a rank that waited for a token of its own could keep one
that holds another's.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from common.governor.choice import ShareChooser, tried_shares
from common.governor.measurements import Measurements
from common.governor.objective import OF_WHOLE_GROUPS, WindowPrice
from common.governor.rates import bracket_of
from common.governor.reading import decode_rate
from common.governor.tally import StepTally
from common.step.tasks import AHEAD, Task
from common.worker.decode_watch import same_batch, watched_iteration_s
from common.worker.live_decode import LiveDecode
from common.worker.sm_shares import SmShares, device_sms, sm_shares
from common.worker.sm_token import SmToken

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from common.governor.reading import Reading
    from common.governor.table import CoRunTable
    from common.worker.context import RunContext
    from common.worker.ranks import Ranks

log = logging.getLogger(__name__)

T = TypeVar("T")

TABLES_FOLDER = "governor"
"""In the run's folder: what each service has measured."""
WRITTEN_AT_FIRST = 5
"""Steps after each of which the measured table is written."""
WRITTEN_EVERY = 50
"""Steps after which it is written from then on."""

_KINDS = {Task.AHEAD_VISION: Task.POLICY_VISION, Task.AHEAD_REFERENCE: Task.REFERENCE_PREFIX}
"""What is done ahead is of the kind of what it is done ahead of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Governed(Generic[T]):
    """A job that has ended.

    Attributes:
        sms: that it could fill; 0: all.
        decode_rate: of the decode beside it, over its rate alone; 0: none, or not measured.
    """

    value: T
    sms: int
    decode_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judgement:
    """What the compute thread chooses with, and from."""

    shares: SmShares
    measured: Measurements
    chooser: ShareChooser


class Governor:
    """Of one background service in one run.

    `watch_alone`, `run` and `step_ended` are for the compute thread, one after the other.
    """

    def __init__(
        self,
        table: CoRunTable,
        device: torch.device,
        live: LiveDecode,
        token: SmToken,
        *,
        fixed: bool,
        record: Path,
        ranks: Ranks | None = None,
        leads: bool = True,
    ) -> None:
        """Begin with nothing measured.

        Args:
            token: held for each job beside a decode.
            fixed: shares are chosen from the table alone; else it is what to begin with.
            record: file for the measured table.
            ranks: of the service; None: there is one.
            leads: whether this rank chooses.
        """
        self.token = token
        self._table = table
        self._device = device
        self._live = live
        self._fixed = fixed
        self._record = record
        self._ranks = ranks
        self._leads = leads
        self._steps = 0
        self._tally = StepTally()
        self._price = WindowPrice()
        self._beside_ns: tuple[int, int] | None = None
        """Begin and end of this step's prefixes and vision beside the decode."""
        self._made: _Judgement | None = None

    @classmethod
    async def open(cls, context: RunContext, table: CoRunTable, *, fixed: bool = False) -> Governor:
        """Attach to what the run's services share."""
        me = context.participant
        name = f"{me.service}.json" if me.rank == 0 else f"{me.service}-{me.rank}.json"
        return cls(
            table,
            context.device,
            await LiveDecode.open(context) if context.leads else LiveDecode.private(),
            await SmToken.open(context) if context.leads else SmToken.private(),
            fixed=fixed,
            record=context.run_dir / TABLES_FOLDER / name,
            ranks=context.joined,
            leads=context.leads,
        )

    @property
    def wants_token(self) -> bool:
        """Whether a job has to hold the token at the moment: a sequence decodes. Any thread."""
        return self._leads and self._live.rows > 0

    def watch_alone(self) -> None:
        """Measure the decode with nothing beside it, if that is due. The token is held."""
        rows = self._live.rows
        if rows <= 0:
            return
        measured, bracket = self._judgement.measured, bracket_of(rows)
        if measured.ask_alone(bracket):
            seconds = watched_iteration_s(self._live)
            if seconds is not None:
                measured.add_alone(bracket, seconds)

    def run(
        self,
        task: Task,
        job: Callable[[], T],
        *,
        work: float = 1.0,
        beside: bool = True,
    ) -> Governed[T]:
        """Run a job to the end of its kernels.

        Args:
            job: one for the next step that gives None has done nothing, and is no sample.
            work: size of the job, in a unit of the task's own.
            beside: whether the token is held; without it the job has the whole GPU, or what rank 0
                has chosen.
        """
        if not self._leads:
            return self._follow(task, job)
        judgement, kind = self._judgement, _KINDS.get(task, task)
        before = self._live.reading()
        share = judgement.shares.total_sms
        beside = beside and before.rows > 0
        if beside:
            share = judgement.chooser.choose(kind, before.rows, self._price.of(kind))
        self._told(task, share)
        with self.token.taken(share) if beside else nullcontext():
            value = judgement.shares.run(share, job)
        after, rate = self._live.reading(), None
        if beside and kind not in OF_WHOLE_GROUPS:
            began_ns = before.at_ns if self._beside_ns is None else self._beside_ns[0]
            self._beside_ns = (began_ns, after.at_ns)
        if value is not None or task not in AHEAD:
            rate = self._observe(kind, share, before, after, work=work, beside=beside)
        sms = share if share < judgement.shares.total_sms else 0
        return Governed(value=value, sms=sms, decode_rate=rate or 0.0)

    def _follow(self, task: Task, job: Callable[[], T]) -> Governed[T]:
        shares = self._judgement.shares
        share = self._told(task, shares.total_sms)
        value = shares.run(share, job)
        return Governed(value=value, sms=share if share < shares.total_sms else 0, decode_rate=0.0)

    def _told(self, task: Task, share: int) -> int:
        """Rank 0's share. Nothing decodes in an update, whose jobs ranks may count differently."""
        if self._ranks is None or task is Task.UPDATE:
            return share
        return self._ranks.told(share)

    def step_ended(self, step: int, *, window_closed: bool) -> None:
        """Log what ran beside the step's decode, and write down what is known by now.

        Args: window_closed: whether its decode came to an end.
        """
        lines = self._tally.lines()
        if lines:
            log.info("beside the decode", extra={"step": step, **lines})
        self._tally = StepTally()
        if self._beside_ns is not None:
            (began_ns, done_ns), self._beside_ns = self._beside_ns, None
            closed_ns = self._live.reading().ended_ns
            if window_closed and closed_ns > began_ns:
                self._price.window_closed(max(0.0, (closed_ns - done_ns) / (closed_ns - began_ns)))
        if self._made is None:
            return
        self._made.measured.next_step()
        self._steps += 1
        if self._steps <= WRITTEN_AT_FIRST or self._steps % WRITTEN_EVERY == 0:
            self._write(self._made)

    def close(self) -> None:
        """Drop the mappings."""
        self._live.close()
        self.token.close()

    @property
    def _judgement(self) -> _Judgement:
        if self._made is None:
            total = device_sms(self._device)
            wanted = self._table.shares(total_sms=total) if self._fixed else tried_shares(total)
            shares = sm_shares(self._device, wanted)
            measured = Measurements(self._table, total_sms=total)
            chooser = ShareChooser(
                shares.shares,
                total_sms=total,
                table=self._table,
                measured=None if self._fixed else measured,
            )
            self._made = _Judgement(shares=shares, measured=measured, chooser=chooser)
        return self._made

    def _observe(
        self, kind: Task, share: int, before: Reading, after: Reading, *, work: float, beside: bool
    ) -> float | None:
        """Returns: the decode's rate over its rate alone, where it can be told."""
        judgement, seconds = self._judgement, (after.at_ns - before.at_ns) / 1e9
        measured, unit_s = judgement.measured, seconds / max(work, 1.0)
        if not beside:
            if before.rows <= 0 and after.rows <= 0 and before.iterations == after.iterations:
                measured.add_whole(kind, unit_s)
            return None
        rate, sampled, bracket = None, False, bracket_of(before.rows)
        alone_s = measured.alone_s(bracket)
        if alone_s is not None and same_batch(before, after):
            rate = decode_rate(before, after, alone_s)
        if rate is not None:
            sampled = measured.add_beside(kind, bracket, share, unit_s=unit_s, decode_rate=rate)
        self._tally.add(
            kind,
            share,
            seconds=seconds,
            decode_rate=rate,
            sampled=sampled,
            rates=judgement.chooser.rates(kind, before.rows, share),
        )
        return rate

    def _write(self, judgement: _Judgement) -> None:
        table = judgement.measured.table(judgement.shares.device_name)
        if table is None:
            return
        # Readers of the folder see a whole file, and no file that is none of theirs.
        draft = self._record.with_suffix(".part")
        try:
            self._record.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(table.resolved_json() + "\n", encoding="utf-8")
            draft.replace(self._record)
        except OSError as error:
            log.warning("co-run rates not written", extra={"cause": str(error)})
