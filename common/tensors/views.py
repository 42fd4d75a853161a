"""Broker memory as torch tensors, zero-copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from common.tensors.device import HOST
from common.tensors.spec import DType, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.tensors.device import DeviceBytes

_DTYPES: dict[DType, torch.dtype] = {dtype: getattr(torch, dtype) for dtype in DType}
_NAMES: dict[torch.dtype, DType] = {value: key for key, value in _DTYPES.items()}


class TensorSource(Protocol):
    """A lease or a storage."""

    @property
    def device(self) -> str:
        """Where it lies: ``cpu``, or a GPU's UUID."""

    def spec(self, name: str) -> TensorSpec:
        """What the tensor is."""

    def buffer(self, name: str) -> memoryview:
        """Its bytes in host memory."""

    def device_buffer(self, name: str) -> DeviceBytes:
        """Its bytes on a GPU."""


class _Window:
    """Bytes offered to numpy as writable, whether or not the pages are.

    torch has no read-only tensors and warns, once a process, about a read-only buffer.
    """

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer  # keeps the pages mapped for as long as a tensor refers to this
        address = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (buffer.nbytes,),
            "data": (address, False),
        }


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch type of an element type."""
    return _DTYPES[dtype]


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Describe a tensor, to allocate one like it.

    Raises:
        KeyError: an element type that the broker does not carry.
    """
    return TensorSpec(name=name, dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape))


def tensor_view(source: TensorSource, name: str) -> torch.Tensor:
    """One tensor of a lease or storage, where it lies.

    The tensor keeps the pages mapped, also after the lease was released; a release says that the
    bytes may belong to others from then on. Writing to a consumer's view in host memory ends the
    process with a memory fault: the pages themselves are read-only. A GPU does not notice.

    Args:
        name: as in the specification.

    Returns: a dense tensor of the specified type and shape over the broker's memory.

    Raises:
        LeaseMisuse: no such tensor, or it was let go.
    """
    spec = source.spec(name)
    if source.device != HOST:
        return device_tensor(source.device_buffer(name), spec)
    return host_tensor(source.buffer(name), spec)


def host_tensor(buffer: memoryview, spec: TensorSpec) -> torch.Tensor:
    """A tensor over mapped bytes in host memory, which it keeps mapped; see `tensor_view`."""
    dtype = _DTYPES[spec.dtype]
    if not buffer.nbytes:
        return torch.empty(spec.shape, dtype=dtype)
    flat = torch.from_numpy(np.asarray(_Window(buffer)))
    return flat.view(dtype).view(spec.shape)


def device_tensor(source: DeviceBytes, spec: TensorSpec) -> torch.Tensor:
    """A tensor over mapped bytes of a GPU, which it keeps mapped."""
    dtype, device = _DTYPES[spec.dtype], torch.device("cuda", source.ordinal)
    if not source.nbytes:
        return torch.empty(spec.shape, dtype=dtype, device=device)
    flat = torch.as_tensor(source, device=device)
    assert flat.data_ptr() == source.address, "torch made a copy"
    return flat.view(dtype).view(spec.shape)


def tensor_views(source: TensorSource, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Several tensors of a lease or storage, by name; see `tensor_view`."""
    return {name: tensor_view(source, name) for name in names}
