"""The learner's training state: views of the shared storages, the optimizer's in parts.

Shapes: E elements of all weights, Et of the trainable ones (see `common.weights.layout`), n of one
part's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.rl.optimizer import cast_weights
from common.tensors.views import tensor_view
from common.worker.optimizer_parts import MASTERS, MOMENTS

if TYPE_CHECKING:
    import torch

    from common.tensors.storage import Storage
    from common.weights.layout import WeightLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """Masters and moments of a range of the trainable weights."""

    elements: slice
    """Of the flat trainable weights and gradients."""
    weights: torch.Tensor
    """[n] in the compute dtype: that range of the weights."""
    masters: torch.Tensor
    """[n] in the accumulator's dtype; the weights themselves where the dtypes agree."""
    moments: torch.Tensor
    """[2, n] in the accumulator's dtype."""

    @classmethod
    def of(cls, storage: Storage, elements: slice, weights_E: torch.Tensor) -> StatePart:
        """Views of one part's storage; it must not be parked."""
        weights = weights_E[elements]
        masters = tensor_view(storage, MASTERS) if MASTERS in storage.specs else weights
        return cls(
            elements=elements,
            weights=weights,
            masters=masters,
            moments=tensor_view(storage, MOMENTS),
        )

    def begin_from_weights(self) -> None:
        """A fresh start: masters are the loaded weights, moments are zero."""
        if self.masters.data_ptr() != self.weights.data_ptr():
            self.masters.copy_(self.weights)
        self.moments.zero_()

    def cast(self) -> None:
        """Make the compute weights of the range the cast masters."""
        cast_weights(self.masters, self.weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Weights, masters, moments and gradients of one rank."""

    layout: WeightLayout
    weights: torch.Tensor
    """[E] in the compute dtype."""
    parts: tuple[StatePart, ...]
    """In the order of the weights; together they cover those that this rank updates."""
    gradients: torch.Tensor
    """[Et] in the accumulator's dtype; unnormalised sums until the update."""

    @property
    def own(self) -> slice:
        """Of the trainable elements, those that this rank updates: all, or of several replicas the
        share of this one."""
        return slice(self.parts[0].elements.start, self.parts[-1].elements.stop)

    @property
    def trainable_weights(self) -> torch.Tensor:
        """[Et] of the weights, a view."""
        return self.weights[: self.layout.trainable_elements]

    @property
    def dtype(self) -> torch.dtype:
        """The accumulator's: of masters, moments and gradients."""
        return self.gradients.dtype
