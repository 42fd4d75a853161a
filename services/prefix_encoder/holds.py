"""Read holds of one epoch on the weights of both roles.

The policy's is given back as soon as every living group is accumulated, so that the update may
begin; work ahead that still reads a frozen part of those weights puts that off to its own end.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from common.step.tasks import Task
from common.worker.reference import ReferenceWeights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.tensors.storage import Hold, Storage
    from common.worker.scope import StepScope


class WeightHolds:
    """Of one epoch; what is still held at its end, its scope gives back.

    Attributes:
        reference: the reference's weights, where there are any.
    """

    def __init__(
        self, scope: StepScope, weights: Storage, reference_weights: Storage | None
    ) -> None:
        self._scope = scope
        self._weights = weights
        self._policy: Hold | None = None
        self._readers_ahead = 0
        self.reference = ReferenceWeights(scope, reference_weights, task=Task.REFERENCE_PREFIX)

    @property
    def has_policy(self) -> bool:
        """Whether the policy's weights are held."""
        return self._policy is not None

    async def hold_policy(self) -> None:
        """Hold the version that the step reads."""
        if self._policy is None:
            self._policy = await self._scope.read(self._weights, self._scope.view.version)

    @contextmanager
    def reading_ahead(self) -> Iterator[None]:
        """Keep the policy's hold for a job ahead.

        A block that is left by an error may leave its job running: the hold ends with the scope.
        """
        self._readers_ahead += 1
        yield
        self._readers_ahead -= 1
        self.advance()

    def advance(self) -> None:
        """Let the update begin once every living group is accumulated, and the reference go."""
        self.reference.advance()
        hold = self._policy
        if hold is not None and self._scope.view.accumulated and not self._readers_ahead:
            self._policy = None
            self._scope.give_back(hold)
