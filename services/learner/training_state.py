"""The learner's training state: views of the shared storages, the optimizer's in parts.

Shapes: E elements of all weights, Et of the trainable ones (see `common.weights.layout`), Es of the
weights' storage (see `common.weights.places`), n of one part's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.tensors.views import tensor_view
from common.weights.placed import PlacedRange, placed
from common.worker.optimizer_parts import MASTERS, MOMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from common.tensors.storage import Storage
    from common.weights.layout import WeightLayout
    from common.weights.places import WeightPlaces


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """Masters and moments of a range of the trainable weights."""

    elements: slice
    """Of the flat trainable weights and gradients."""
    weights: PlacedRange
    """[n] in the compute dtype: that range of the weights."""
    masters: torch.Tensor | None
    """[n] in the accumulator's dtype; None where the dtypes agree: they are the weights."""
    moments: torch.Tensor
    """[2, n] in the accumulator's dtype."""

    @classmethod
    def of(cls, storage: Storage, elements: slice, weights: PlacedRange) -> StatePart:
        """Views of one part's storage; it must not be parked."""
        has_masters = MASTERS in storage.specs
        return cls(
            elements=elements,
            weights=weights,
            masters=tensor_view(storage, MASTERS) if has_masters else None,
            moments=tensor_view(storage, MOMENTS),
        )

    def begin_from_weights(self) -> None:
        """A fresh start: masters are the loaded weights, moments are zero."""
        if self.masters is not None:
            self.weights.copy_to(self.masters)
        self.moments.zero_()

    def masters_in_place(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """The masters' memory: ranges of [n], and what has them, the last axis fastest."""
        if self.masters is None:
            yield from self.weights
        else:
            yield slice(0, self.masters.numel()), self.masters

    def read_masters(self, values: torch.Tensor) -> None:
        """Read the masters into [n]; of padding where weights have gaps, nothing is written."""
        if self.masters is not None:
            values.copy_(self.masters)
        else:
            self.weights.copy_to(values)

    def write_masters(self, values: torch.Tensor) -> None:
        """Make [n] the masters, and, cast, the compute weights."""
        if self.masters is not None:
            self.masters.copy_(values)
        self.weights.copy_(values)

    def cast(self) -> None:
        """Make the compute weights of the range the cast masters."""
        if self.masters is not None:
            self.weights.copy_(self.masters)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Weights, masters, moments and gradients of one rank."""

    layout: WeightLayout
    weights: torch.Tensor
    """[Es] in the compute dtype."""
    places: WeightPlaces
    """Of the weights in their storage."""
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
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The weights by name, views."""
        return placed(self.weights, self.places)

    @property
    def trainable_weights(self) -> PlacedRange:
        """[Et] of the weights."""
        elements = slice(0, self.layout.trainable_elements)
        return PlacedRange(self.weights, self.places, elements)

    @property
    def pushed_weights(self) -> torch.Tensor:
        """[E] of the weights, in one piece: nothing is gathered into those that are pushed."""
        assert not self.places.gaps, "a rollout with weights of its own gathers nothing here"
        return self.weights

    @property
    def dtype(self) -> torch.dtype:
        """The accumulator's: of masters, moments and gradients."""
        return self.gradients.dtype
