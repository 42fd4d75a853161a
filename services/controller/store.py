"""Runs in Redis: the controller's records and journal, on disk when a call returns."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from common.ids import Epoch, RunId
from common.step.plan import StepMode
from services.controller.record import History, RunRecord, StepRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.registry import runs as ledger_module
    from common.registry.runs import RunLedger
    from common.step.plan import StepPlan

_OWN_COLUMNS = ("run_id", "state", "epoch", "created_unix_ms")
"""Parts of a record that the ledger keeps itself."""

_PAGE = 1000


class JournalKind(StrEnum):
    """What a run's journal tells."""

    BEGUN = "begun"
    """An epoch was begun."""
    COMMITTED = "committed"
    """A step counts; the body is its `StepRecord`."""
    ABORTED = "aborted"
    """An epoch was ended without an update."""
    REWOUND = "rewound"
    """The steps from `version` on are superseded and run again."""


class Store:
    """The ledger, seen as the controller needs it.

    Every write carries the newest epoch that this controller took, so that it is refused (`Stale`)
    once another controller has taken one. Calls wait as long as Redis is away.
    """

    def __init__(self, ledger: RunLedger) -> None:
        self._ledger = ledger
        self._epochs: dict[RunId, Epoch] = {}

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._ledger.close()

    async def create(self, record: RunRecord) -> RunRecord:
        """Make a run known; a repeated `request_id` gives the run that was made before."""
        made = await self._ledger.create(
            record.run_id,
            state=record.state.value,
            created_unix_ms=record.created_unix_ms,
            fields=_fields(record),
            request_id=record.request_id or None,
        )
        return _from_ledger(made)

    async def load(self) -> list[tuple[RunRecord, History]]:
        """All runs, oldest first; the journal of the ended ones is not read."""
        found = []
        for raw in await self._ledger.runs():
            record, history = _from_ledger(raw), History()
            if not record.state.ended:
                record, history = await self._replay(record)
            self._epochs[record.run_id] = Epoch(record.epoch)
            found.append((record, history))
        return found

    async def save(self, record: RunRecord) -> None:
        """Write the record. Raises Stale."""
        await self._ledger.update(
            record.run_id,
            epoch=self._epoch(record.run_id),
            state=record.state.value,
            fields=_fields(record),
        )

    async def next_epoch(self, run_id: RunId) -> Epoch:
        """Take the run's next epoch."""
        epoch = await self._ledger.next_epoch(run_id)
        self._epochs[run_id] = epoch
        return epoch

    async def begun(self, plan: StepPlan) -> None:
        """Journal the beginning of an epoch."""
        body = {
            "step": plan.step,
            "mode": plan.mode,
            "weights_version": plan.weights_version,
            "samples": [group.sample for group in plan.groups],
        }
        await self._append(plan.run_id, JournalKind.BEGUN, body)

    async def committed(self, run_id: RunId, step: StepRecord) -> None:
        """Journal a step that counts from now on."""
        await self._append(run_id, JournalKind.COMMITTED, step.to_json())

    async def aborted(self, run_id: RunId, step: int, epoch: int, reason: str) -> None:
        """Journal the end of an epoch that made no update."""
        body = {"step": step, "epoch": epoch, "reason": reason}
        await self._append(run_id, JournalKind.ABORTED, body)

    async def rewound(self, run_id: RunId, version: int) -> None:
        """Journal that the steps from `version` on are superseded."""
        await self._append(run_id, JournalKind.REWOUND, {"version": version})

    async def durable_metrics(self, run_id: RunId, version: int) -> dict[str, float]:
        """Metrics of the durable record of that version; empty: there is none."""
        for durable in await self._ledger.durable(run_id):
            if durable.version == version:
                return dict(durable.metrics)
        return {}

    async def _append(self, run_id: RunId, kind: JournalKind, body: Mapping[str, Any]) -> None:
        await self._ledger.append_journal(
            run_id, epoch=self._epoch(run_id), kind=kind.value, body=body
        )

    async def _replay(self, record: RunRecord) -> tuple[RunRecord, History]:
        """The record as the journal makes it: the journal is written first."""
        done, evaluated = record.steps_done, dict[int, float]()
        after = ""
        while entries := await self._ledger.read_journal(record.run_id, after=after, limit=_PAGE):
            after = entries[-1].entry_id
            for entry in entries:
                done = _replay_entry(entry, done, evaluated)
        return replace(record, steps_done=done), History(evaluated=evaluated)

    def _epoch(self, run_id: RunId) -> Epoch:
        return self._epochs.get(run_id, Epoch(0))


def _replay_entry(entry: ledger_module.JournalEntry, done: int, evaluated: dict[int, float]) -> int:
    match entry.kind:
        case JournalKind.COMMITTED:
            step = StepRecord.from_json(entry.body)
            if step.mode is StepMode.EVAL:
                evaluated[step.weights_version] = step.metrics.get("reward_mean", 0.0)
                return done
            return step.weights_version
        case JournalKind.REWOUND:
            return int(entry.body["version"])
        case _:
            return done


def _fields(record: RunRecord) -> dict[str, Any]:
    tree = record.to_json()
    return {name: value for name, value in tree.items() if name not in _OWN_COLUMNS}


def _from_ledger(raw: ledger_module.RunRecord) -> RunRecord:
    return RunRecord.from_json(
        {
            **raw.fields,
            "run_id": raw.run_id,
            "state": raw.state,
            "epoch": raw.epoch,
            "created_unix_ms": raw.created_unix_ms,
        }
    )
