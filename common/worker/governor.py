"""Which SMs the compute jobs of a background service fill while sequences decode.

The rollout writes its live batch into one word of shared memory. A background service reads it
before each job: nothing decodes, and the job has the whole GPU; otherwise it runs on the stream of
the share that the co-run table calls for, and alone among the background services, because the
shares of two processes are the same SMs. Being alone is an exclusive hold on a storage of its own.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, TypeVar

import torch

from common.gpu.driver import CudaDriverError
from common.gpu.green_streams import GreenStreams
from common.ids import Service
from common.tensors.spec import DType, Placement, TensorSpec
from common.tensors.storage import StorageSpec
from common.worker.device import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.governor.table import CoRunTable
    from common.ids import Participant
    from common.tensors.storage import Storage
    from common.worker.context import RunContext

log = logging.getLogger(__name__)

T = TypeVar("T")

ROWS_STORAGE = "rollout.rows"
TOKEN_STORAGE = "sm.token"  # noqa: S105 - whose turn it is, no secret
BACKGROUND = (Service.PREFIX_ENCODER, Service.REFERENCE, Service.LEARNER)
"""Services whose jobs may run beside the decode."""
_WORD = "word"


class LiveRows:
    """The number of sequences that decode at the moment, as one process sees it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._word = storage.buffer(_WORD).cast("B").cast("q")

    @classmethod
    async def open(cls, context: RunContext) -> LiveRows:
        """Create or attach to the run's word."""
        rollout = context.peer(Service.ROLLOUT)
        readers = tuple(context.peer(service) for service in BACKGROUND)
        spec = _word_spec(readers=readers, writers=(rollout,))
        return cls(await context.broker.open_storage(context.run_id, ROWS_STORAGE, create=spec))

    @property
    def value(self) -> int:
        """As last written; any thread."""
        return int(self._word[0])

    def set(self, rows: int) -> None:
        """Write; the rollout alone does."""
        self._word[0] = rows

    def close(self) -> None:
        """Drop the mapping."""
        self._word.release()
        self._storage.close()


class Governor:
    """Of one background service in one run."""

    def __init__(
        self, table: CoRunTable, device: torch.device, rows: LiveRows, token: Storage
    ) -> None:
        """Args: token: held for each job beside a decode."""
        self.token = token
        self._table = table
        self._device = device
        self._rows = rows

    @classmethod
    async def open(cls, context: RunContext, table: CoRunTable) -> Governor:
        """Attach to what the run's services share."""
        holders = tuple(context.peer(service) for service in BACKGROUND)
        spec = _word_spec(readers=(), writers=holders)
        token = await context.broker.open_storage(context.run_id, TOKEN_STORAGE, create=spec)
        return cls(table, context.device, await LiveRows.open(context), token)

    @property
    def decoding(self) -> bool:
        """Whether a sequence decodes at the moment."""
        return self._rows.value > 0

    def run(self, job: Callable[[], T]) -> tuple[T, int]:
        """Run a job to the end of its kernels, in the compute thread.

        Returns: its result, and the SMs that it could fill; 0: all.
        """
        streams = _streams(self._device, self._table)
        rows = self._rows.value
        if streams is None or rows <= 0:
            return self._on_whole(job)
        share = self._table.share_for(rows, total_sms=streams.total_sms)
        if share >= streams.total_sms:
            return self._on_whole(job)
        stream = streams.stream(share)
        with torch.cuda.stream(stream):
            value = job()
            stream.synchronize()
        log.debug("governed", extra={"rows": rows, "sms": share})
        return value, share

    def close(self) -> None:
        """Drop the mappings."""
        self._rows.close()
        self.token.close()

    def _on_whole(self, job: Callable[[], T]) -> tuple[T, int]:
        value = job()
        wait_for(self._device)
        return value, 0


@functools.cache
def _streams(device: torch.device, table: CoRunTable) -> GreenStreams | None:
    """Made once a process, in the compute thread; None where there are no shares to be had."""
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).multi_processor_count
    try:
        streams = GreenStreams(device.index, table.shares(total_sms=total))
    except CudaDriverError as error:
        log.warning(
            "no SM shares on this GPU: background work starves the decode",
            extra={"cause": str(error)},
        )
        return None
    log.info("SM shares", extra={"shares": streams.shares, "table": table.device})
    return streams


def _word_spec(
    *, readers: tuple[Participant, ...], writers: tuple[Participant, ...]
) -> StorageSpec:
    word = TensorSpec(name=_WORD, dtype=DType.INT64, shape=(1,))
    return StorageSpec(tensors=(word,), readers=readers, writers=writers, placement=Placement.HOST)
