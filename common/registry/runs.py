"""The run ledger: what has to outlive every process of a run.

Every write names the writer's epoch. Taking the next epoch fences out whoever holds an older one,
a stale controller included: its writes raise `Stale`. Each write may be repeated by the retry after
a broken connection and still has one effect.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from common.errors import AlreadyExists, FailedPrecondition, NotFound, Stale
from common.ids import Epoch, RunId, WeightsVersion
from common.registry.connection import RedisBroken, open_redis, retry_redis
from common.registry.keys import JOURNAL_LIMIT, REQUEST_TTL_S, Keys
from common.registry.scripts import APPEND_JOURNAL, COMMIT_DURABLE, CREATE, NEXT_EPOCH, UPDATE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    from common.config.deployment import Deployment

DurableKind = Literal["checkpoint", "shadow"]

_FIELD = "field:"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What the ledger knows of a run.

    Attributes:
        run_id: the run.
        state: one of the controller's run states.
        epoch: the newest epoch taken; 0: none yet.
        created_unix_ms: wall clock at creation.
        fields: everything else, JSON values by name.
    """

    run_id: RunId
    state: str
    epoch: Epoch
    created_unix_ms: int
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One thing that happened, in order. `entry_id` is what `read_journal` continues after."""

    entry_id: str
    kind: str
    epoch: Epoch
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableRecord:
    """Where one durable copy of the training state is.

    Attributes:
        kind: a checkpoint folder, or a slot of the learner's host shadow.
        version: weights version that it holds.
        location: folder, or slot name.
        epoch: the epoch that committed it.
        metrics: numbers of the step that made it.
    """

    kind: DurableKind
    version: WeightsVersion
    location: str
    epoch: Epoch
    metrics: Mapping[str, float] = field(default_factory=dict)


class RunLedger:
    """Runs of one deployment."""

    def __init__(self, url: str, deployment: str, *, deadline_s: float | None = None) -> None:
        """Args:
        url: Redis address.
        deployment: its name; part of every key.
        deadline_s: how long calls wait while Redis is away; None: for ever.
        """
        self.url = url
        self.keys = Keys(deployment)
        self._deadline_s = deadline_s
        self._redis = open_redis(url)

    @classmethod
    def of(cls, deployment: Deployment, *, deadline_s: float | None = None) -> RunLedger:
        """The ledger that a deployment names."""
        return cls(deployment.redis_url, deployment.name, deadline_s=deadline_s)

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._redis.aclose()

    async def create(
        self,
        run_id: RunId,
        *,
        state: str,
        created_unix_ms: int,
        fields: Mapping[str, Any],
        request_id: str | None = None,
    ) -> RunRecord:
        """Make a run known, with epoch 0.

        Returns: the record; that of the earlier run when `request_id` already made one.

        Raises:
            AlreadyExists: the run id is taken by another creation.
        """
        token = uuid.uuid4().hex
        request_key = self.keys.request(request_id) if request_id else ""
        outcome, existing = await self._eval(
            f"creating run {run_id}",
            CREATE,
            [self.keys.record(run_id), self.keys.runs, request_key],
            [run_id, created_unix_ms, state, token, REQUEST_TTL_S, *_flatten(fields)],
        )
        if outcome == "taken":
            raise AlreadyExists(f"run {run_id} exists; choose another id", run_id=run_id)
        return await self.get(RunId(existing))

    async def get(self, run_id: RunId) -> RunRecord:
        """Raises NotFound."""
        raw = await self._retry(
            f"reading run {run_id}", lambda: self._redis.hgetall(self.keys.record(run_id))
        )
        if not raw:
            _not_found(run_id)
        return _record(run_id, raw)

    async def runs(self) -> list[RunRecord]:
        """All runs, oldest first."""

        async def read() -> list[tuple[str, dict[str, str]]]:
            ids: Any = await self._redis.zrange(self.keys.runs, 0, -1)
            async with self._redis.pipeline(transaction=False) as pipeline:
                for run_id in ids:
                    pipeline.hgetall(self.keys.record(run_id))
                return list(zip(ids, await pipeline.execute(), strict=True))

        found = await self._retry("listing the runs", read)
        return [_record(RunId(run_id), raw) for run_id, raw in found if raw]

    async def next_epoch(self, run_id: RunId) -> Epoch:
        """Take the next epoch: from now on, writes with an older one are refused.

        Raises:
            NotFound: no such run.
        """
        epoch = await self._eval(
            f"next epoch of run {run_id}", NEXT_EPOCH, [self.keys.record(run_id)], []
        )
        if int(epoch) == 0:
            _not_found(run_id)
        return Epoch(int(epoch))

    async def update(
        self,
        run_id: RunId,
        *,
        epoch: Epoch,
        expect: Collection[str] | None = None,
        state: str | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> RunRecord:
        """Change state and fields in one move.

        Args:
            run_id: the run.
            epoch: the writer's; it has to be the newest.
            expect: states that the run may be in; None: any.
            state: the new state; None: it stays.
            fields: values to set; others stay.

        Raises:
            NotFound: no such run.
            Stale: a newer epoch was taken.
            FailedPrecondition: the run is in a state that is not expected.
        """
        outcome, found = await self._eval(
            f"updating run {run_id}",
            UPDATE,
            [self.keys.record(run_id)],
            [
                epoch,
                uuid.uuid4().hex,
                json.dumps(sorted(expect)) if expect is not None else "",
                state or "",
                *_flatten(fields or {}),
            ],
        )
        if outcome == "state":
            raise FailedPrecondition(
                f"run {run_id} is {found}; this needs it to be {' or '.join(sorted(expect or ()))}",
                run_id=run_id,
                state=found,
            )
        self._raise_unless_done(outcome, found, run_id, epoch)
        return await self.get(run_id)

    async def append_journal(
        self, run_id: RunId, *, epoch: Epoch, kind: str, body: Mapping[str, Any]
    ) -> str:
        """Append one entry; its id comes back when it is on disk.

        Raises:
            NotFound: no such run.
            Stale: a newer epoch was taken.
        """
        outcome, found = await self._eval(
            f"journal of run {run_id}",
            APPEND_JOURNAL,
            [self.keys.record(run_id), self.keys.journal(run_id)],
            [epoch, uuid.uuid4().hex, JOURNAL_LIMIT, kind, json.dumps(body)],
        )
        self._raise_unless_done(outcome, found, run_id, epoch)
        return str(found)

    async def read_journal(
        self, run_id: RunId, *, after: str = "", limit: int = 1000
    ) -> list[JournalEntry]:
        """Entries after that id (empty: from the first), oldest first, at most `limit`."""
        start = f"({after}" if after else "-"
        entries = await self._retry(
            f"reading the journal of run {run_id}",
            lambda: self._redis.xrange(self.keys.journal(run_id), min=start, count=limit),
        )
        return [
            JournalEntry(
                entry_id=entry_id,
                kind=raw["kind"],
                epoch=Epoch(int(raw["epoch"])),
                body=json.loads(raw["body"]),
            )
            for entry_id, raw in entries
        ]

    async def commit_durable(self, run_id: RunId, record: DurableRecord) -> None:
        """Make `record` the durable copy of its kind. On disk when this returns.

        Raises:
            NotFound: no such run.
            Stale: a newer epoch was taken; the copy does not count.
        """
        outcome, found = await self._eval(
            f"committing version {record.version} of run {run_id}",
            COMMIT_DURABLE,
            [self.keys.record(run_id), self.keys.durable(run_id)],
            [record.epoch, record.kind, json.dumps(asdict(record))],
        )
        self._raise_unless_done(outcome, found, run_id, record.epoch)

    async def durable(self, run_id: RunId) -> list[DurableRecord]:
        """The durable copies, newest version first; at equal versions the checkpoint first."""
        raw = await self._retry(
            f"reading the durable state of run {run_id}",
            lambda: self._redis.hgetall(self.keys.durable(run_id)),
        )
        try:
            records = [DurableRecord(**json.loads(text)) for text in raw.values()]
        except (ValueError, TypeError) as error:
            raise RedisBroken(f"durable record of run {run_id} cannot be read: {error}") from error
        return sorted(records, key=lambda record: (-record.version, record.kind))

    def _raise_unless_done(self, outcome: str, found: str, run_id: RunId, epoch: Epoch) -> None:
        if outcome == "missing":
            _not_found(run_id)
        if outcome == "stale":
            raise Stale(
                f"epoch {epoch} of run {run_id} has ended: epoch {found} was taken",
                run_id=run_id,
                epoch=epoch,
                newest=int(found),
            )

    async def _eval(self, what: str, script: str, keys: list[str], arguments: list[Any]) -> Any:
        return await self._retry(
            what, lambda: self._redis.eval(script, len(keys), *keys, *arguments)
        )

    async def _retry(self, what: str, operation: Callable[[], Awaitable[Any]]) -> Any:
        return await retry_redis(operation, what=what, url=self.url, deadline_s=self._deadline_s)


def _flatten(fields: Mapping[str, Any]) -> list[str]:
    return [part for name, value in fields.items() for part in (_FIELD + name, json.dumps(value))]


def _record(run_id: RunId, raw: Mapping[str, str]) -> RunRecord:
    try:
        return RunRecord(
            run_id=run_id,
            state=raw["state"],
            epoch=Epoch(int(raw["epoch"])),
            created_unix_ms=int(raw["created_unix_ms"]),
            fields={
                name.removeprefix(_FIELD): json.loads(text)
                for name, text in raw.items()
                if name.startswith(_FIELD)
            },
        )
    except (KeyError, ValueError) as error:
        raise RedisBroken(f"record of run {run_id} cannot be read: {error}") from error


def _not_found(run_id: RunId) -> NoReturn:
    raise NotFound(f"there is no run {run_id}", run_id=run_id)
