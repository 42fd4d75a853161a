"""The learner's training state: views of the shared storages, and how it is saved and restored.

Shapes: E elements of all weights, Et of the trainable ones; see `common.weights.layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.rl.optimizer import cast_weights
from common.tensors.views import tensor_view
from common.worker.weights import FLAT, MASTERS, MOMENTS

if TYPE_CHECKING:
    import torch

    from common.tensors.storage import Storage
    from common.weights.layout import WeightLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Weights, masters, moments and gradients of one rank."""

    layout: WeightLayout
    weights: torch.Tensor
    """[E] in the compute dtype."""
    masters: torch.Tensor
    """[Et] in the accumulator's dtype; the weights themselves where the dtypes agree."""
    moments: torch.Tensor
    """[2, Et] in the accumulator's dtype."""
    gradients: torch.Tensor
    """[Et] in the accumulator's dtype; unnormalised sums until the update."""

    @classmethod
    def of(
        cls, layout: WeightLayout, *, weights: Storage, optimizer: Storage, gradients: Storage
    ) -> TrainingState:
        """Views of the storages."""
        flat = tensor_view(weights, FLAT)
        if MASTERS in optimizer.specs:
            masters = tensor_view(optimizer, MASTERS)
        else:
            masters = flat[: layout.trainable_elements]
        return cls(
            layout=layout,
            weights=flat,
            masters=masters,
            moments=tensor_view(optimizer, MOMENTS),
            gradients=tensor_view(gradients, FLAT),
        )

    def masters_from_weights(self) -> None:
        """A fresh start: masters are the loaded weights, moments are zero."""
        if not self._aliased:
            self.masters.copy_(self.weights[: self.layout.trainable_elements])
        self.moments.zero_()

    def weights_from_masters(self) -> None:
        """Make the trainable compute weights the cast masters."""
        cast_weights(self.masters, self.weights[: self.layout.trainable_elements])

    @property
    def _aliased(self) -> bool:
        return self.masters.data_ptr() == self.weights.data_ptr()
