"""The policy's weights of one rank of the rollout where training has another degree.

Invariants:
- Parameters are views of training's storages where the plan aliases or gathers them, and of a
  storage of this rank, `rollout.weights`, where it rebuilds them.
- The gaps in a training rank's storage are part of `rollout.weights`, in all but their place: this
  rank alone writes and reads them, and its storage's version and holds are theirs. Training's ranks
  write their own tensors, never a gap, so that a gap's version outlives whatever they do.
- Whoever reads parameters holds the same version of all storages that they lie in. This rank's gets
  a version under read holds of what it is made of, alone, and is readable only when it and the gaps
  are whole. A rank that dies meanwhile leaves it torn, and training's storages as they were.
- A version may come again with other contents, after a return to a checkpoint: so what was made
  counts until the next configuration, which every such return has.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch

from common.ids import Service
from common.layouts.node import rollout_sharing, source_ranks, training_sharing
from common.tensors.errors import BrokerTimeout, StaleVersion
from common.tensors.views import tensor_view
from common.vlm.parallel.model import config_shape
from common.vlm.parallel.shards import rank_layout, shards
from common.weights.layout import ALIGNMENT_ELEMENTS
from common.weights.placed import placed
from common.weights.places import WeightPlaces
from common.weights.resharding.buffers import own_elements
from common.weights.resharding.direct import DirectResharding
from common.worker.threads import in_thread
from common.worker.weights import FLAT, POLICY_WEIGHTS, ROLLOUT_WEIGHTS, flat_spec
from services.rollout.refreshed import Refreshed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from common.ids import WeightsVersion
    from common.tensors.storage import Storage
    from common.worker.context import RunContext
    from common.worker.weights import ModelShape

PASSING_S = 1.0
"""Longest wait of a reader in passing for the second and further storages."""
OPEN_TIMEOUT_S = 120.0
"""Longest wait for training's ranks to create their storages."""


class ReshardedHold:
    """Read holds of one version.

    Attributes:
        refreshed: what was done for them.
    """

    def __init__(self, refreshed: Refreshed, held: ExitStack) -> None:
        self.refreshed = refreshed
        self._held = held

    def release(self) -> None:
        """Let go of all of them. Any thread; idempotent."""
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class ReshardedWeights:
    """See the module's text.

    Attributes:
        tensors: this rank's part of each parameter by name; they stay where they are.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        shared: Mapping[int, Storage],
        own: Storage | None,
        resharding: DirectResharding,
        *,
        alias_bytes: int,
    ) -> None:
        """Args: shared: by rank of training. own: None: nothing is copied."""
        self.tensors = tensors
        self._shared = shared
        self._own = own
        self._resharding = resharding
        self._alias_bytes = alias_bytes
        self._whole: WeightsVersion | None = None
        """The version that this rank's storage and the gaps have; None: none that counts."""
        self._refreshing = asyncio.Lock()

    @classmethod
    async def open(cls, context: RunContext, shape: ModelShape) -> ReshardedWeights:
        """Attach to training's storages, and to this rank's own.

        Raises:
            MissingWeight: names every tensor that a rank of training lacks.
            BrokerTimeout: a rank of training has not created its storage in time.
        """
        broker, run_id, me = context.broker, context.run_id, context.participant
        model, degree = config_shape(shape.config), context.partners.count(Service.LEARNER)
        place, plan = context.place, shape.plan
        assert plan is not None, "with equal degrees the learner's storage is read as it is"
        sharing = rollout_sharing(plan, place.tensor_rank, replica=place.replica)
        # of the replicas of training, which all have the same, the one on this rank's GPU
        replica = sharing.train_replica
        shared: dict[int, Storage] = {}
        sources: dict[int, dict[str, torch.Tensor]] = {}
        for rank in source_ranks(sharing):
            name = context.storage_name(POLICY_WEIGHTS, replica * degree + rank)
            shared[rank] = await broker.open_storage(run_id, name, timeout_s=OPEN_TIMEOUT_S)
            parts = shards(shape.whole, model, rank=rank, degree=degree)
            layout = rank_layout(shape.whole, parts, rank=rank, degree=degree)
            places = WeightPlaces.planned(layout, training_sharing(plan, rank, replica=replica))
            sources[rank] = {
                name: _matrix(one)
                for name, one in placed(tensor_view(shared[rank], FLAT), places).items()
            }
        own, own_E = None, torch.empty(0, dtype=context.dtype)
        if sharing.gather_bytes or sharing.rebuild_bytes:
            # With gaps alone it has no bytes that are read, but their version and holds.
            elements = max(own_elements(sharing), ALIGNMENT_ELEMENTS)
            spec = flat_spec(elements, context.dtype, readers=(me,), writers=(me,))
            name = context.storage_name(ROLLOUT_WEIGHTS)
            own = await broker.open_storage(run_id, name, create=spec)
            own_E = tensor_view(own, FLAT)
        resharding = DirectResharding(plan, sharing, sources, own_E)
        tensors = {
            entry.name: resharding.targets[entry.name].view(entry.shape)
            for entry in shape.layout.entries
            if entry.name in resharding.targets
        }
        return cls(tensors, shared, own, resharding, alias_bytes=sharing.alias_bytes)

    async def hold_read(
        self, version: WeightsVersion, *, timeout_s: float = 60.0, passing: bool = False
    ) -> ReshardedHold:
        """Wait until `version` is readable, make it whole here, and keep it so.

        A cancellation waits for copies that are being made.

        Args: passing: as there; an update that goes on meanwhile is not held up for long.
        Raises: as `Storage.hold_read`.
        """
        with ExitStack() as held:
            for number, storage in enumerate(self._shared.values()):
                # An update may wait for the first one, and what is waited for here for the update.
                in_passing = passing and number > 0
                patience_s = PASSING_S if in_passing else timeout_s
                try:
                    hold = await storage.hold_read(version, timeout_s=patience_s, passing=passing)
                except BrokerTimeout as error:
                    if not in_passing:
                        raise
                    raise StaleVersion(f"{storage.name} is being written: {error}") from error
                held.callback(hold.release)
            refreshed = Refreshed(alias_bytes=self._alias_bytes)
            if self._own is not None:
                async with self._refreshing:
                    if self._whole != version:
                        refreshed = await self._refresh(self._own, version, timeout_s=timeout_s)
                    own = await self._own.hold_read(version, timeout_s=timeout_s, passing=passing)
                held.callback(own.release)
            return ReshardedHold(refreshed, held.pop_all())

    async def _refresh(
        self, own: Storage, version: WeightsVersion, *, timeout_s: float
    ) -> Refreshed:
        """Under read holds of that version of training's storages."""
        with await own.hold_write(version, timeout_s=timeout_s) as hold:
            self._whole = None
            start_s = time.monotonic()
            done = await in_thread(partial(self._resharding.update, version))
            seconds = time.monotonic() - start_s
            await hold.publish()
        self._whole = version
        return Refreshed(
            alias_bytes=done.alias_bytes,
            gather_bytes=done.gather_bytes,
            rebuild_bytes=done.rebuild_bytes,
            seconds=seconds,
        )

    def forget(self) -> None:
        """Make the next version that is wanted anew, be it the one that is here."""
        self._whole = None

    def park_again(self) -> None:
        """Nothing of them is ever parked."""

    def close(self) -> None:
        """Drop the mappings."""
        for storage in (*self._shared.values(), self._own):
            if storage is not None:
                storage.close()


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """As layouts have it: no tensor has more than two axes; the first one stays."""
    return tensor.flatten(1) if tensor.dim() > 2 else tensor
