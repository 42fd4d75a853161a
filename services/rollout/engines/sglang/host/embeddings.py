"""A prompt's vision embeddings where all of the engine's processes can read them.

The requests of a group have the same prompt: what travels with each of them is where its embeddings
are, not what they are.

Shapes: V vision tokens, h hidden width.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRows:
    """Rows of shared embeddings. Unpickled, in whatever process, they are a tensor [rows, h].

    Attributes:
        path: of the memory, for every process of this user, while `SharedEmbeddings` is open.
        start, end: which rows; as many as `end - start` are mapped, and none of them copied.
        digest: of their values, 64 bits.
    """

    path: str
    shape: tuple[int, int]
    dtype: torch.dtype
    start: int
    end: int
    digest: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, (self.path, self.shape, self.dtype, self.start, self.end)

    def left_out(self) -> EmbeddingRows:
        """The same without any row, for who does not compute them again."""
        return EmbeddingRows(
            path=self.path,
            shape=self.shape,
            dtype=self.dtype,
            start=self.start,
            end=self.start,
            digest=self.digest,
        )


class SharedEmbeddings:
    """Memory of this process with the embeddings of one prompt, until `close`."""

    def __init__(self, vision_Vh: Tensor) -> None:
        """Args: vision_Vh: [V, h] on the host, at least one row."""
        self._shape = (vision_Vh.shape[0], vision_Vh.shape[1])
        self._dtype = vision_Vh.dtype
        self._bytes = vision_Vh.contiguous().view(torch.uint8).numpy().data
        self._descriptor = os.memfd_create("rollplex-embeddings")
        with open(self._descriptor, "wb", closefd=False) as memory:
            memory.write(self._bytes)

    def rows(self, start: int, end: int) -> EmbeddingRows:
        """Some rows, with their digest."""
        digest = hashlib.sha256(self._bytes[start:end]).digest()
        return EmbeddingRows(
            path=f"/proc/{os.getpid()}/fd/{self._descriptor}",
            shape=self._shape,
            dtype=self._dtype,
            start=start,
            end=end,
            digest=int.from_bytes(digest[:8], "little"),
        )

    def close(self) -> None:
        """Processes that have mapped it keep it. Once."""
        os.close(self._descriptor)


def _mapped(path: str, shape: tuple[int, int], dtype: torch.dtype, start: int, end: int) -> Tensor:
    if start == end:
        return torch.empty((0, shape[1]), dtype=dtype)
    whole = torch.from_file(path, shared=False, size=shape[0] * shape[1], dtype=dtype)
    return whole.view(shape)[start:end]
