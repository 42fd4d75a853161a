"""Specifications and layouts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidArgument, RemoteError
from common.tensors.errors import ERRORS, StaleLease
from common.tensors.spec import ALIGNMENT_BYTES, DType, TensorSpec, layout
from common.tensors.wire import (
    error_from_proto,
    error_to_proto,
    specs_from_proto,
    specs_to_proto,
)
from protos.rollplex.v1 import common_pb2

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
specs = st.builds(
    TensorSpec,
    name=st.text(min_size=1, max_size=8),
    dtype=st.sampled_from(DType),
    shape=shapes,
)


@given(st.lists(specs, min_size=1, max_size=8, unique_by=lambda spec: spec.name))
def test_tensors_are_aligned_and_do_not_overlap(tensors: list[TensorSpec]) -> None:
    placed = layout(tensors)
    end_bytes = 0
    for before, after in zip(tensors, placed.specs, strict=True):
        assert (after.name, after.dtype, after.shape) == (before.name, before.dtype, before.shape)
        assert after.offset_bytes % ALIGNMENT_BYTES == 0
        assert end_bytes <= after.offset_bytes < end_bytes + ALIGNMENT_BYTES
        end_bytes = after.offset_bytes + after.nbytes
    assert placed.size_bytes == end_bytes


@given(st.lists(specs, max_size=4))
def test_round_trip(tensors: list[TensorSpec]) -> None:
    assert specs_from_proto(specs_to_proto(tensors)) == tuple(tensors)


def test_sizes() -> None:
    assert TensorSpec(name="a", dtype=DType.BFLOAT16, shape=(3, 5)).nbytes == 30
    assert TensorSpec(name="scalar", dtype=DType.FLOAT64, shape=()).nbytes == 8
    assert TensorSpec(name="none", dtype=DType.FLOAT32, shape=(4, 0)).nbytes == 0


def test_bad_specs_are_named() -> None:
    with pytest.raises(InvalidArgument, match=r"tensor kv has shape \[2, -1\]"):
        TensorSpec(name="kv", dtype=DType.FLOAT32, shape=(2, -1))
    with pytest.raises(InvalidArgument, match="empty name"):
        TensorSpec(name="", dtype=DType.FLOAT32, shape=())
    with pytest.raises(InvalidArgument, match="at least one tensor"):
        layout([])
    same = TensorSpec(name="kv", dtype=DType.FLOAT32, shape=(1,))
    with pytest.raises(InvalidArgument, match="two tensors of one allocation are named kv"):
        layout([same, same])


def test_unknown_dtype_names_the_legal_ones() -> None:
    message = common_pb2.TensorSpec(name="kv", dtype="float9")
    with pytest.raises(InvalidArgument, match=r"tensor kv has dtype 'float9'; legal are float64"):
        specs_from_proto([message])


def test_errors_keep_their_type_and_text() -> None:
    for name, kind in ERRORS.items():
        error = error_from_proto(error_to_proto(kind("lease 4 ended"), service="broker/0"))
        assert type(error) is kind
        assert kind.__name__ == name
        assert str(error) == "lease 4 ended"
    assert issubclass(StaleLease, ERRORS["Stale"])


def test_unknown_errors_become_remote_errors() -> None:
    detail = common_pb2.ErrorDetail(
        code="new", type="NewError", message="text", service="broker/0", node="here", pid=7
    )
    error = error_from_proto(detail)
    assert isinstance(error, RemoteError)
    assert str(error) == "NewError in broker/0 (pid 7 on here): text"
