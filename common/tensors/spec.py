"""Names, types and places of the tensors inside one allocation.

Shapes are in elements, offsets and sizes in bytes from the start of the allocation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from common.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

ALIGNMENT_BYTES = 64
"""Every tensor starts at a multiple of this: a cache line, and the widest vector load."""


class DType(StrEnum):
    """Element types, named as torch names them."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZES[self]


_ITEMSIZES = {
    DType.FLOAT64: 8,
    DType.FLOAT32: 4,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.INT16: 2,
    DType.INT8: 1,
    DType.UINT8: 1,
    DType.BOOL: 1,
}


class Residency(StrEnum):
    """How long an allocation stays in device memory."""

    PINNED = "pinned"
    """Always: weights in use."""
    PHASE = "phase"
    """Until its consumers have released it."""
    SPILLABLE = "spillable"
    """May leave the device outside its phase: optimizer state, reference weights."""


class Placement(StrEnum):
    """Which memory an allocation lies in. On a node without GPUs both are the host's."""

    HOST = "host"
    """Memory of the machine: small control tensors, optimizer state that is to leave the GPU."""
    DEVICE = "device"
    """Memory of the GPU that the participant computes on."""


class Held(StrEnum):
    """What a process takes of its device beside the broker's memory."""

    ALLOCATOR = "allocator"
    """Its own allocator: activations, graphs, workspaces, and what it caches."""
    CONTEXT = "context"
    """Its CUDA context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One named tensor of an allocation, dense and row-major.

    Raises InvalidArgument on an empty name or a negative size.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    """Empty: a scalar. A zero among the sizes: no elements."""
    offset_bytes: int = 0
    """From the start of the allocation; set by `layout`."""

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidArgument("a tensor has an empty name; every tensor needs one")
        if any(size < 0 for size in self.shape):
            raise InvalidArgument(
                f"tensor {self.name} has shape {list(self.shape)}; sizes have to be 0 or more",
                tensor=self.name,
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the tensors of one allocation lie."""

    specs: tuple[TensorSpec, ...]
    size_bytes: int
    """Bytes from the start of the first tensor to the end of the last."""


def layout(specs: Sequence[TensorSpec]) -> Layout:
    """Place tensors one after the other, each aligned to `ALIGNMENT_BYTES`.

    Args:
        specs: in the order in which they will lie; their offsets are ignored.

    Raises:
        InvalidArgument: no tensors, or two of one name.
    """
    if not specs:
        raise InvalidArgument("an allocation needs at least one tensor; got none")
    placed: dict[str, TensorSpec] = {}
    end_bytes = 0
    for spec in specs:
        if spec.name in placed:
            raise InvalidArgument(
                f"two tensors of one allocation are named {spec.name}; names have to differ",
                tensor=spec.name,
            )
        offset_bytes = -(-end_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        placed[spec.name] = replace(spec, offset_bytes=offset_bytes)
        end_bytes = offset_bytes + spec.nbytes
    return Layout(specs=tuple(placed.values()), size_bytes=end_bytes)
