"""The policy's storages in the learner, opened, parked, asked for their version, written anew.

The optimizer's state is in parts, and no method needs more of them on the device than one. What can
be spilled is parked as soon as it is not used any more.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from common.ids import Service
from common.tensors.views import tensor_view
from common.worker.device import wait_for
from common.worker.optimizer_parts import optimizer_parts
from common.worker.threads import in_thread
from common.worker.weights import FLAT, POLICY_GRADIENTS, POLICY_WEIGHTS, flat_spec
from services.learner.training_state import StatePart, TrainingState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from common.ids import WeightsVersion
    from common.tensors.storage import Storage, StorageSpec
    from common.weights.layout import WeightLayout
    from common.worker.context import RunContext

HOLD_TIMEOUT_S = 120.0
"""Longest wait for readers of an older version to let go, or for spilled state to come back."""


class LearnerStorages:
    """See the module's text.

    Attributes:
        weights: of the policy.
        gradients: the accumulator.
        optimizer: a storage a part, in the order of the weights.
        state: views of all of them.
    """

    def __init__(
        self,
        context: RunContext,
        specs: dict[str, StorageSpec],
        state: TrainingState,
        *,
        weights: Storage,
        gradients: Storage,
        optimizer: Iterable[Storage],
    ) -> None:
        self._context = context
        self._specs = specs
        self.weights = weights
        self.gradients = gradients
        self.optimizer = tuple(optimizer)
        self.state = state

    @classmethod
    async def open(cls, context: RunContext, layout: WeightLayout) -> LearnerStorages:
        """Create them, or attach to those that are there."""
        me, encoder = context.participant, context.peer(Service.PREFIX_ENCODER)
        # One that is pushed to has weights of its own.
        sharing = () if context.push is not None else context.partners.everyone(Service.ROLLOUT)
        specs = {
            POLICY_WEIGHTS: flat_spec(
                layout.total_elements,
                context.dtype,
                readers=(me, encoder, *sharing),
                writers=(me,),
            ),
            POLICY_GRADIENTS: flat_spec(
                layout.trainable_elements,
                context.accumulator_dtype,
                readers=(),
                writers=(me, encoder),
            ),
        }
        specs = {context.storage_name(name): spec for name, spec in specs.items()}
        storages = {
            name: await context.broker.open_storage(context.run_id, name, create=spec)
            for name, spec in specs.items()
        }
        weights = storages.pop(context.storage_name(POLICY_WEIGHTS))
        gradients = storages.pop(context.storage_name(POLICY_GRADIENTS))
        weights_E = tensor_view(weights, FLAT)
        parts = []
        for part in optimizer_parts(context, layout, me):
            specs[part.name] = part.spec
            storage = await context.broker.open_storage(context.run_id, part.name, create=part.spec)
            storages[part.name] = storage
            parts.append(StatePart.of(storage, part.elements, weights_E))
            if context.spills_optimizer:
                # Before the next one is made: there may be no room for all.
                await in_thread(storage.park)
        state = TrainingState(
            layout=layout,
            weights=weights_E,
            parts=tuple(parts),
            gradients=tensor_view(gradients, FLAT),
        )
        return cls(
            context, specs, state, weights=weights, gradients=gradients, optimizer=storages.values()
        )

    def parts(self) -> Iterator[tuple[Storage, StatePart]]:
        """Each part of the optimizer's state, with its storage."""
        return zip(self.optimizer, self.state.parts, strict=True)

    @property
    def sizes_bytes(self) -> list[int]:
        """Bytes of each part's masters and moments."""
        specs = [self._specs[storage.name] for storage in self.optimizer]
        return [sum(tensor.nbytes for tensor in spec.tensors) for spec in specs]

    def park(self) -> None:
        """Let the optimizer's state leave the device, where the run wants that. Blocks."""
        for storage in self.optimizer:
            self.park_part(storage)

    def park_part(self, storage: Storage) -> None:
        """The same for one part. Blocks until no kernel of this process runs."""
        if self._context.spills_optimizer:
            storage.park()

    async def whole_version(self) -> WeightsVersion | None:
        """The version that all of them hold; None: they differ, or one is torn or empty."""
        found: set[WeightsVersion | None] = set()
        for storage in (*self.optimizer, self.weights):
            name = storage.name
            probe = await self._context.broker.open_storage(
                self._context.run_id, name, create=self._specs[name]
            )
            found.add(None if probe.torn else probe.version)
            probe.close()
            if storage is not self.weights:
                await in_thread(partial(self.park_part, storage))
        return found.pop() if len(found) == 1 else None

    async def rewrite(
        self,
        version: WeightsVersion,
        fill_weights: Callable[[], None],
        fill_part: Callable[[StatePart], None],
        complete: Callable[[], None],
    ) -> None:
        """Write all of them anew as one version; they are torn, or differ, if that fails.

        Args:
            fill_weights: fills the compute weights; whatever one of the three raises is raised.
            fill_part: then fills masters and moments of a part; the compute weights of its range
                may be changed too.
            complete: then, with all parts filled, may change the compute weights again.
        """
        with await self.weights.hold_write(version, timeout_s=HOLD_TIMEOUT_S) as whole:
            await self._done(fill_weights)
            for storage, part in self.parts():
                with await storage.hold_write(version, timeout_s=HOLD_TIMEOUT_S) as hold:
                    await self._done(partial(fill_part, part))
                    await hold.publish()
                await in_thread(partial(self.park_part, storage))
            await self._done(complete)
            await whole.publish()

    async def read_parts(self, version: WeightsVersion, read: Callable[[StatePart], None]) -> None:
        """Have each part of a version read while it is held."""
        for storage, part in self.parts():
            with await storage.hold_read(version, timeout_s=HOLD_TIMEOUT_S):
                await in_thread(partial(read, part))
            await in_thread(partial(self.park_part, storage))

    def close(self) -> None:
        """Drop the mappings."""
        for storage in (self.weights, *self.optimizer, self.gradients):
            storage.close()

    async def _done(self, fill: Callable[[], None]) -> None:
        """Run it to the end of its kernels."""

        def filled() -> None:
            fill()
            wait_for(self._context.device)

        await in_thread(filled)
