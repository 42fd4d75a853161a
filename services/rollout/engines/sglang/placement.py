"""Where each of the engine's parameters lies in the policy's flat weights.

Shapes: E = `total_elements` of the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.layouts.kinds import LayoutName
from common.layouts.model import layout_pair
from common.vlm.names import VISUAL, in_memory_name
from common.weights.errors import LayoutMismatch, UnexpectedWeight, shown
from common.weights.layout import missing_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from common.layouts.tensors import RankTensor
    from common.vlm.shape import ModelShape
    from common.weights.layout import TensorEntry, WeightLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedParameter:
    """One parameter of the engine.

    Attributes:
        name: as the engine calls it.
        entries: its parts in the flat weights, one after the other along its rows.
        alias: whether they lie so that the parameter can be a view of them.
    """

    name: str
    entries: tuple[TensorEntry, ...]
    alias: bool

    @property
    def numel(self) -> int:
        """Elements of all parts."""
        return sum(entry.numel for entry in self.entries)

    def view(self, flat_E: Tensor, like: Tensor) -> Tensor:
        """The parts as one tensor of the parameter's shape, without a copy; only for an alias."""
        return flat_E.narrow(0, self.entries[0].offset_elements, self.numel).view(like.shape)

    def copy(self, flat_E: Tensor, into: Tensor) -> None:
        """Write the parts into the parameter; rows behind them are padding and stay."""
        target = into.view(-1)
        done = 0
        for entry in self.entries:
            part = flat_E.narrow(0, entry.offset_elements, entry.numel)
            target.narrow(0, done, entry.numel).copy_(part)
            done += entry.numel


def place(
    parameters: Mapping[str, Tensor], layout: WeightLayout, shape: ModelShape, *, ranks: int = 1
) -> list[PlacedParameter]:
    """Account for every parameter of one of the engine's ranks, and for every weight.

    The engine has no tower: it is given what the policy's makes of pictures.

    Args:
        parameters: the rank's, under all their names.
        layout: of the policy's weights on the same rank of as many.
        ranks: of the engine; of several each has equally many rows of a table.
    Raises: MissingWeight naming parameters that no weight belongs to; UnexpectedWeight naming
        weights that no parameter takes; LayoutMismatch if sizes or the dtype differ.
    """
    _, rollout = layout_pair(shape, (LayoutName.NATIVE, 1), (LayoutName.SGLANG, 1))
    fused = _by_name(rollout.ranks[0])
    names = {name: in_memory_name(name) for name in parameters}
    if missing := [name for name, planned in names.items() if planned not in fused]:
        raise missing_error(missing, "the plan of SGLang's layout")
    placed = []
    used: set[str] = set()
    for name, tensor in parameters.items():
        entries = tuple(layout.select(fused[names[name]]).values())
        used |= {entry.name for entry in entries}
        placed.append(_placed(name, tensor, entries, layout.dtype, may_pad=ranks == 1))
    text = {name for name in layout.names if not name.startswith(VISUAL)}
    if extra := sorted(text - used):
        raise UnexpectedWeight(f"the engine has no parameter for: {shown(extra)}", names=extra)
    return placed


def _placed(
    name: str, tensor: Tensor, entries: tuple[TensorEntry, ...], dtype: str, *, may_pad: bool
) -> PlacedParameter:
    elements = sum(entry.numel for entry in entries)
    if str(tensor.dtype) != f"torch.{dtype}":
        raise LayoutMismatch(f"{name} is {tensor.dtype} in the engine and {dtype} in the policy")
    # only tables of tokens are padded, by whole rows at their end, which the last of ranks has
    padded = may_pad and len(entries) == 1 and tensor.numel() > elements
    if tensor.numel() != elements and not padded:
        raise LayoutMismatch(
            f"{name} has {tensor.numel()} elements in the engine and {elements} in the policy"
        )
    ends = [entry.offset_elements + entry.numel for entry in entries]
    adjacent = all(
        end == after.offset_elements for end, after in zip(ends, entries[1:], strict=False)
    )
    return PlacedParameter(name=name, entries=entries, alias=adjacent and not padded)


def _by_name(tensors: tuple[RankTensor, ...]) -> dict[str, tuple[str, ...]]:
    """Names of the weights that each of the plan's tensors of the text model joins."""
    found = {}
    for tensor in tensors:
        for layer in range(tensor.count):
            parts = tuple(part.tensor.name.replace("*", str(layer)) for part in tensor.parts)
            names = tensor.layer_names(layer)
            found.update({name: parts for name in names if not name.startswith(VISUAL)})
    return found
