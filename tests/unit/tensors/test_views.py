"""Broker memory as tensors."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch

from common.tensors.errors import LeaseMisuse
from common.tensors.mapping import Mapping
from common.tensors.spec import DType, TensorSpec, layout
from common.tensors.views import spec_of, tensor_view, tensor_views, torch_dtype

SIZE_BYTES = 1 << 16


class Source:
    """What a lease is to `tensor_view`."""

    device = "cpu"

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping

    def spec(self, name: str) -> TensorSpec:
        return self.mapping.spec(name)

    def buffer(self, name: str) -> memoryview:
        return self.mapping.view(name)


def pair(*tensors: TensorSpec) -> tuple[Source, Source]:
    """The same memory, writable and read-only."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, SIZE_BYTES)
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    specs = layout(tensors).specs
    writer, reader = (
        Source(Mapping.of_fd(one, name="kv", size_bytes=SIZE_BYTES, specs=specs))
        for one in (fd, read_only)
    )
    assert writer.mapping.writable
    assert not reader.mapping.writable
    return writer, reader


@pytest.mark.parametrize("dtype", list(DType))
def test_every_dtype_is_the_same_memory(dtype: DType) -> None:
    other = TensorSpec(name="before", dtype=DType.UINT8, shape=(3,))
    spec = TensorSpec(name="values", dtype=dtype, shape=(2, 3))
    writer, reader = pair(other, spec)
    seen = tensor_view(reader, "values")
    wanted = torch.arange(6).view(2, 3).to(torch_dtype(dtype))
    tensor_view(writer, "values").copy_(wanted)
    assert seen.dtype is wanted.dtype
    assert torch.equal(seen, wanted)
    assert spec_of("values", seen) == spec


def test_scalars_and_empty_tensors() -> None:
    writer, reader = pair(
        TensorSpec(name="scalar", dtype=DType.INT64, shape=()),
        TensorSpec(name="empty", dtype=DType.BFLOAT16, shape=(0, 5)),
    )
    tensor_view(writer, "scalar").fill_(-7)
    views = tensor_views(reader, ["scalar", "empty"])
    assert views["scalar"].item() == -7
    assert views["empty"].shape == (0, 5)
    assert views["empty"].dtype is torch.bfloat16


def test_a_tensor_keeps_the_pages() -> None:
    writer, reader = pair(TensorSpec(name="values", dtype=DType.FLOAT32, shape=(4,)))
    tensor_view(writer, "values").copy_(torch.ones(4))
    part = tensor_view(reader, "values")[2:]
    pages = weakref.ref(reader.mapping.pages)
    reader.mapping.drop()
    writer.mapping.drop()
    gc.collect()
    assert part.sum() == 2
    del part
    gc.collect()
    assert pages() is None


def test_dropped_mapping_gives_no_more_views() -> None:
    writer, _ = pair(TensorSpec(name="values", dtype=DType.FLOAT32, shape=(4,)))
    with pytest.raises(LeaseMisuse, match="kv has no tensor keys; it has values"):
        tensor_view(writer, "keys")
    writer.mapping.drop()
    with pytest.raises(LeaseMisuse, match="kv was let go"):
        tensor_view(writer, "values")


def test_read_only_bytes_stay_so() -> None:
    _, reader = pair(TensorSpec(name="values", dtype=DType.UINT8, shape=(4,)))
    with pytest.raises(TypeError, match="read-only"):
        reader.buffer("values")[0] = 1
