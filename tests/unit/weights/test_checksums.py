from __future__ import annotations

import torch

from common.weights.checksums import checksums


def test_every_bit_shape_and_dtype_counts():
    bits = torch.randint(0, 256, (3, 40), dtype=torch.uint8)
    first = checksums({"a": bits})["a"]
    assert checksums({"b": bits.clone()})["b"] == first
    for at in range(bits.numel()):
        changed = bits.clone()
        changed.view(-1)[at] ^= 1 << at % 8
        assert checksums({"a": changed})["a"] != first
    assert checksums({"a": bits.view(40, 3)})["a"] != first
    assert checksums({"a": bits.view(torch.int8)})["a"] != first
    zeros = torch.zeros(2)
    assert checksums({"a": zeros}) != checksums({"a": -zeros})


def test_only_the_order_of_elements_counts_not_how_they_lie():
    whole = torch.randn(6, 8, dtype=torch.bfloat16)
    expected = checksums({"a": whole.clone()})
    assert checksums({"a": whole.t().contiguous().t()}) == expected
    wide = torch.zeros(6, 20, dtype=torch.bfloat16)
    wide[:, 5:13] = whole
    assert checksums({"a": wide[:, 5:13]}) == expected
    assert checksums({"a": whole.t()}) != expected


def test_large_tensors_are_read_in_pieces(monkeypatch):
    tensor = torch.randn(1000)
    whole = checksums({"a": tensor})
    monkeypatch.setattr("common.weights.checksums._CHUNK_BYTES", 96)
    assert checksums({"a": tensor}) == whole
    tensor[-1] += 1
    assert checksums({"a": tensor}) != whole


def test_tied_tensors_have_one_checksum_and_a_broken_tie_two():
    tensor = torch.randn(4, 4)
    tied = checksums({"a": tensor, "b": tensor})
    assert tied["a"] == tied["b"]
    other = tensor.clone()
    other[2, 3] += 1
    assert len(set(checksums({"a": tensor, "b": other}).values())) == 2


def test_a_scalar_and_an_empty_tensor_have_checksums():
    assert len(set(checksums({"a": torch.tensor(1.0), "b": torch.empty(0)}).values())) == 2
