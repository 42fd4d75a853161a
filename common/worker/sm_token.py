"""Whose job runs beside the decode, and how many SMs it may fill.

The services that work beside a decode hold the token one at a time, because the shares of two
processes are the same SMs. The holder leaves its share in the token's one word of shared memory
for the rollout, which launches its kernels accordingly.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from common.ids import Service
from common.tensors.spec import DType, Placement, TensorSpec
from common.tensors.storage import StorageSpec
from common.worker.live_decode import BACKGROUND

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.tensors.storage import Storage
    from common.worker.context import RunContext

TOKEN_STORAGE = "sm.token"  # noqa: S105 - whose turn it is, no secret
_NAME = "share"


class SmToken:
    """Of one run, as one of its processes sees it."""

    def __init__(self, word: memoryview, storage: Storage | None = None) -> None:
        """Args: word: of 64 bits, signed; storage: what it lies in."""
        self._word = word
        self._storage = storage

    @classmethod
    def private(cls) -> SmToken:
        """One that no other process sees, and that cannot be held."""
        return cls(memoryview(bytearray(8)).cast("q"))

    @classmethod
    async def open(cls, context: RunContext) -> SmToken:
        """Create or attach to the run's; for the rank that decides of each service."""
        spec = StorageSpec(
            tensors=(TensorSpec(name=_NAME, dtype=DType.INT64, shape=(1,)),),
            readers=(context.peer(Service.ROLLOUT),),
            writers=tuple(context.peer(service) for service in BACKGROUND),
            placement=Placement.HOST,
        )
        name = context.storage_name(TOKEN_STORAGE, context.peer(Service.ROLLOUT).rank)
        storage = await context.broker.open_storage(context.run_id, name, create=spec)
        return cls(storage.buffer(_NAME).cast("B").cast("q"), storage)

    @property
    def storage(self) -> Storage:
        """To be held exclusively for a job beside the decode."""
        assert self._storage is not None
        return self._storage

    @property
    def share(self) -> int:
        """SMs that a job beside the decode may fill at the moment; 0: there is none.

        A holder that died leaves its share until the next one comes, which costs time at most.
        """
        return int(self._word[0])

    def is_taken(self) -> bool:
        """Whether a job runs beside the decode at the moment."""
        return self.share > 0

    @contextmanager
    def taken(self, share: int) -> Iterator[None]:
        """A job of the holder runs on so many SMs."""
        self._word[0] = share
        try:
            yield
        finally:
            self._word[0] = 0

    def close(self) -> None:
        """Drop the mapping."""
        self._word.release()
        if self._storage is not None:
            self._storage.close()
