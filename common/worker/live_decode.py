"""The decode of a run as all of its processes see it: a few words of shared memory.

The rollout writes them between its iterations; whoever works beside it reads them. A report's three
words are written to the slot that the last one is not in, and then counted, so that a reader never
sees half of one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from common.governor.reading import Reading
from common.ids import Service
from common.tensors.spec import DType, Placement, TensorSpec
from common.tensors.storage import StorageSpec

if TYPE_CHECKING:
    from common.tensors.storage import Storage
    from common.worker.context import RunContext

DECODE_STORAGE = "rollout.decode"
BACKGROUND = (Service.PREFIX_ENCODER, Service.REFERENCE, Service.LEARNER)
"""Services whose jobs may run beside the decode."""
_NAME = "words"
_ROWS, _ADMISSIONS, _REPORTS = range(3)
_SLOTS = 3
"""First word of two slots of `_SLOT` words each: iterations, when the last ended, how many were
reported at once."""
_SLOT = 3
_WORDS = _SLOTS + 2 * _SLOT
_WORD_BYTES = 8


class LiveDecode:
    """See the module's text."""

    def __init__(self, words: memoryview, storage: Storage | None = None) -> None:
        """Args: words: of 64 bits, signed; storage: what they lie in, let go by `close`."""
        self._words = words
        self._storage = storage

    @classmethod
    def private(cls) -> LiveDecode:
        """One that no other process sees."""
        return cls(memoryview(bytearray(_WORDS * _WORD_BYTES)).cast("q"))

    @classmethod
    async def open(cls, context: RunContext) -> LiveDecode:
        """Create or attach to the run's; nothing decodes when the rollout has opened it.

        For the rank that decides of each service.
        """
        spec = StorageSpec(
            tensors=(TensorSpec(name=_NAME, dtype=DType.INT64, shape=(_WORDS,)),),
            readers=tuple(context.peer(service) for service in BACKGROUND),
            writers=(context.peer(Service.ROLLOUT),),
            placement=Placement.HOST,
        )
        name = context.storage_name(DECODE_STORAGE, context.peer(Service.ROLLOUT).rank)
        storage = await context.broker.open_storage(context.run_id, name, create=spec)
        live = cls(storage.buffer(_NAME).cast("B").cast("q"), storage)
        if storage.writable:
            # A rollout that died while it decoded could not say that nothing decodes any more.
            live.set_rows(0)
        return live

    # ---------------------------------------------------------------- any process, any thread

    @property
    def rows(self) -> int:
        """Sequences that decode at the moment."""
        return int(self._words[_ROWS])

    def reading(self) -> Reading:
        """All of it, at this moment."""
        words = self._words
        while True:
            reports = words[_REPORTS]
            at = _SLOTS + _SLOT * (reports % 2)
            iterations, ended_ns, burst = words[at : at + _SLOT]
            if words[_REPORTS] == reports:
                return Reading(
                    at_ns=time.monotonic_ns(),
                    rows=words[_ROWS],
                    admissions=words[_ADMISSIONS],
                    iterations=iterations,
                    ended_ns=ended_ns,
                    burst=max(1, burst),
                )

    # ---------------------------------------------------------------- the rollout alone

    def set_rows(self, rows: int) -> None:
        """So many sequences decode from now on."""
        self._words[_ROWS] = rows

    def admitted(self) -> None:
        """A group was admitted: until now the decode was held up by that."""
        self._words[_ADMISSIONS] += 1

    def iterated(self, count: int = 1) -> None:
        """So many decode iterations have ended, the last of them now."""
        words = self._words
        reports = words[_REPORTS]
        last, following = (_SLOTS + _SLOT * (number % 2) for number in (reports, reports + 1))
        words[following] = words[last] + count
        words[following + 1] = time.monotonic_ns()
        words[following + 2] = count
        words[_REPORTS] = reports + 1

    def close(self) -> None:
        """Drop the mapping."""
        self._words.release()
        if self._storage is not None:
            self._storage.close()
