"""Checksums of tensors, whatever memory they lie in."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_DIGEST_BYTES = 16
_CHUNK_BYTES = 64 << 20
"""Of a tensor on a device, copied to the host at a time."""


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """BLAKE2b of each tensor's dtype, shape, and bytes with the last axis fastest.

    A tensor that is a strided view has the checksum of its contiguous copy, which is made for it.

    Args:
        tensors: any dtype, any device.
    Returns: hexadecimal digests by name. Blocks until the copies to the host are done.
    """
    known: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        # tied parameters are read once
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in known:
            known[place] = _checksum(tensor.detach())
        found[name] = known[place]
    return found


def _checksum(tensor: Tensor) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    digest.update(f"{tensor.dtype}|{tuple(tensor.shape)}|".encode())
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    for chunk in flat.split(_CHUNK_BYTES):
        digest.update(chunk.cpu().numpy().data)
    return digest.hexdigest()
