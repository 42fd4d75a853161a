"""The rollout's copy of the policy's weights, where it shares none with training.

The learner pushes each version to it. A step reads the version that it is about, or fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import FailedPrecondition
from common.events import bodies
from common.ids import WeightsVersion
from common.tensors.views import tensor_view
from common.worker.weights import FLAT, ROLLOUT_WEIGHTS, flat_spec

if TYPE_CHECKING:
    from common.tensors.storage import Storage
    from common.weights.layout import WeightLayout
    from common.worker.context import RunContext
    from common.worker.push_link import PushLink
    from common.worker.scope import StepScope

HOLD_TIMEOUT_S = 120.0
"""Longest wait for those who read the version before, such as a check of the weights."""
_NONE = -1


class WrongVersion(FailedPrecondition):
    """The rollout has the weights of another version than the step's."""

    retryable = True


class OwnWeights:
    """See the module's text."""

    def __init__(self, storage: Storage, link: PushLink) -> None:
        self._storage = storage
        self._link = link
        self._flat_E = tensor_view(storage, FLAT)

    @classmethod
    async def open(cls, context: RunContext, layout: WeightLayout) -> tuple[Storage, OwnWeights]:
        """Create the storage, or attach to the one that an earlier process has left."""
        assert context.push is not None
        me = (context.participant,)
        storage = await context.broker.open_storage(
            context.run_id,
            context.storage_name(ROLLOUT_WEIGHTS),
            create=flat_spec(
                layout.total_elements, context.dtype, readers=context.ranks, writers=me
            ),
        )
        return storage, cls(storage, context.push)

    async def catch_up(self) -> None:
        """Get the version that the learner begins with, unless it is here. Raises PushBroken."""
        storage, link = self._storage, self._link
        whole = storage.version is not None and not storage.torn
        held = storage.version if whole and storage.version is not None else _NONE
        await link.tell(held)
        version = WeightsVersion(await link.hear())
        if version == held:
            return
        with await storage.hold_write(version, timeout_s=HOLD_TIMEOUT_S) as hold:
            await self._receive(self._flat_E.numel())
            await hold.publish()

    def require(self, version: WeightsVersion) -> None:
        """Raises: WrongVersion, so that no step decodes with another one."""
        held = self._storage.version
        if held != version:
            raise WrongVersion(
                f"the step reads weights of version {version}; the rollout has version {held}: no "
                "push of that version has come to its end"
            )

    async def take(self, scope: StepScope, push: bodies.PushBegan) -> None:
        """Receive the version that the learner pushes, and tell that it is here."""
        rewriting = await scope.write(self._storage, push.weights_version, timeout_s=HOLD_TIMEOUT_S)
        if push.elements:
            rewriting.touch()
        await self._receive(push.elements)
        await rewriting.publish()
        scope.give_back(rewriting)
        size_bytes = push.elements * self._flat_E.element_size()
        body = bodies.PushEnded(weights_version=push.weights_version, size_bytes=size_bytes)
        await scope.publish(body)

    def close(self) -> None:
        """Leave the learner: what it was to push will not come."""
        self._link.close()

    async def _receive(self, elements: int) -> None:
        for bucket in self._link.buckets(elements, self._flat_E.dtype):
            await self._link.receive(self._flat_E[bucket])
